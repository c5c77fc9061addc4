"""A run over kept rows comes to a run's numbers without rows, whatever was changed since."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import kept_changes
from tests.helpers.feeds import leave_rows_unchecked
from tests.helpers.kept_changes import (
    DEPTH,
    NUM_SAMPLES,
    WORDS,
    Block,
    Case,
    Outcome,
    Slots,
    block_of,
    powered,
    scaled_by,
)
from tests.helpers.marks import slow

Change = Callable[[Case, random.Random], None]
KINDS = ("memory", "files", "table")
NUM_USUAL, NUM_CASES, PIECE = 10, 1000, 99
_STEP = 7
"""From one case's change to the next; of no common factor with their number."""


def about_one(draw: random.Random) -> float:
    """Draw a factor that may differ from 1 in its last digits alone."""
    return 1.0 + 10.0 ** -draw.uniform(0.3, 9.0)


def edit(change: Callable[[Any, float], object], *, depth: int | None = None) -> Change:
    """Have a block's settings changed, by a factor; of a frozen one where no depth is given."""

    def chosen(case: Case, draw: random.Random) -> None:
        place, factor = draw.randrange(DEPTH) if depth is None else depth, about_one(draw)
        case.edits.append(lambda model: change(model.blocks[place], factor))

    return chosen


def sets(name: str, value: Callable[[float], Any]) -> Change:
    return edit(lambda block, factor: setattr(block, name, value(factor)))


def patch(owner: Any, name: str, value: Callable[[float], Any]) -> Change:
    return lambda case, draw: case.code.append((owner, name, value(about_one(draw))))


def scale_weight(block: Block, factor: float) -> None:
    with torch.no_grad():
        block.linear.weight[3, 4] *= factor


def scale_in_place(tensor: torch.Tensor, factor: float) -> None:
    tensor[1] *= factor


def scale_embedding(case: Case, draw: random.Random) -> None:
    factor = about_one(draw)
    case.edits.append(lambda model: model.embed.weight.data.mul_(factor))


class ScaledLinear(nn.Linear):
    factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.factor


def exchange_linear(block: Any, factor: float) -> None:
    block.linear.__class__ = ScaledLinear
    block.linear.factor = factor


def exchange_class(block: Any, factor: float) -> None:
    block.__class__ = block_of(factor)


def hook(block: Block, factor: float) -> None:
    block.register_forward_hook(lambda _, __, answer: answer * factor)


def hook_before(block: Block, factor: float) -> None:
    block.linear.register_forward_pre_hook(lambda _, given: (given[0] * factor,))


def forward_by(factor: float) -> Callable[..., Any]:
    whole = Block.forward
    return lambda self, hidden: whole(self, hidden) * factor


def linear_by(factor: float) -> Callable[..., Any]:
    return lambda self, hidden: nn.functional.linear(hidden, self.weight, self.bias) * factor


MODEL: dict[str, Change] = {
    "weight": edit(scale_weight),
    "buffer": edit(lambda b, f: scale_in_place(b.buffer, f)),
    "passing buffer": edit(lambda b, f: scale_in_place(b.passing, f)),
    "embedding": scale_embedding,
    "number": sets("number", float),
    "private number": sets("_number", float),
    "set": sets("several", lambda f: {f, 2.0}),
    "private frozenset": sets("_several", lambda f: frozenset({2.0, f})),
    "array": edit(lambda b, f: scale_in_place(b.array, f)),
    "private array": sets("_array", lambda f: np.array([1.0, f, 1.0])),
    "slots": sets("slots", Slots),
    "private slots": edit(lambda b, f: setattr(b._slots[0], "factor", f)),
    "private in an object": edit(lambda b, f: setattr(b.plain, "_factor", f)),
    "list in a dict": edit(lambda b, f: b.named.update(a=[f])),
    "tensor": edit(lambda b, f: scale_in_place(b.tensor, f)),
    "scalar of numpy": sets("scalar", lambda f: np.float32(1 + max(f - 1, 1e-5))),
    "queue": sets("queue", lambda f: deque([f])),
    "memo": sets("memo", lambda f: lru_cache(lambda: f)),
    "cell": sets("cell", scaled_by),
    "partial": sets("part", lambda f: partial(powered, factor=f)),
    "hook": edit(hook),
    "hook before": edit(hook_before),
    "class of a part": edit(exchange_linear),
}
CODE: dict[str, Change] = {
    "class with a cell": edit(exchange_class),
    "forward": patch(Block, "forward", forward_by),
    "forward of a library": patch(nn.Linear, "forward", linear_by),
    "method": patch(Block, "factor", lambda f: lambda self, old=Block.factor: old(self) * f),
    "attribute of a class": patch(Block, "shared", float),
    "function of the module": patch(kept_changes, "one", lambda f: lambda: f),
    "constant": patch(kept_changes, "CONSTANT", float),
    "default": patch(powered, "__kwdefaults__", lambda f: {"factor": f}),
}


def change_word(case: Case, draw: random.Random) -> None:
    own = draw.choice(case.texts)
    place = draw.randrange(1, len(own))
    own[place] = (own[place] + draw.randrange(1, WORDS)) % WORDS


def change_label(case: Case, draw: random.Random) -> None:
    own = draw.choice(case.texts)
    own[0] = (own[0] + draw.randrange(1, 3)) % 3


def cut_text(case: Case, draw: random.Random) -> None:
    draw.choice([own for own in case.texts if len(own) > 3]).pop()


def exchange_texts(case: Case, draw: random.Random) -> None:
    one, other = draw.sample(range(NUM_SAMPLES), 2)
    case.texts[one], case.texts[other] = case.texts[other], case.texts[one]


def reverse_texts(case: Case, _: random.Random) -> None:
    case.texts.reverse()


def shift_words(case: Case, draw: random.Random) -> None:
    case.kind = case.kind if case.kind != "table" else "memory"
    case.shift = draw.randrange(1, WORDS)


def pad_left(case: Case, _: random.Random) -> None:
    case.side = "left"


def in_float32(case: Case, _: random.Random) -> None:
    case.dtype = torch.float32


DATA: dict[str, Change] = {
    "word": change_word, "label": change_label, "length": cut_text, "two texts": exchange_texts,
    "all texts": reverse_texts, "transform": shift_words, "padding side": pad_left,
    "dtype": in_float32,
}  # fmt: skip
MATTERS = MODEL | CODE | DATA


def rows_files(case: Case) -> list[Path]:
    return sorted((case.folder / "rows").glob("*/rows"))


def flip_bits(case: Case, draw: random.Random) -> None:
    path = draw.choice(rows_files(case))
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 30))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut_file(case: Case, draw: random.Random) -> None:
    path = draw.choice(rows_files(case))
    os.truncate(path, draw.randrange(path.stat().st_size))


def zero_file(case: Case, draw: random.Random) -> None:
    path = draw.choice(rows_files(case))
    start, content = draw.randrange(path.stat().st_size), path.read_bytes()
    path.write_bytes(content[:start] + bytes(len(content) - start))


def exchange_rows(case: Case, _: random.Random) -> None:
    one, other, *_rest = rows_files(case)
    content = one.read_bytes()
    shutil.copyfile(other, one)
    other.write_bytes(content)


def damage_description(case: Case, draw: random.Random) -> None:
    for path in rows_files(case):
        about = path.parent / "about.json"
        text = about.read_text()
        place = draw.randrange(len(text))
        about.write_text(text[:place] + draw.choice("0x}") + text[place + 1 :])


def remove_file(case: Case, draw: random.Random) -> None:
    (draw.choice(rows_files(case)).parent / draw.choice(("rows", "about.json"))).unlink()


def make_longer(case: Case, draw: random.Random) -> None:
    with draw.choice(rows_files(case)).open("ab") as file:
        file.write(bytes(draw.randrange(1, 5000)))


def claim_more_rows(case: Case, draw: random.Random) -> None:
    about = draw.choice(rows_files(case)).parent / "about.json"
    facts = json.loads(about.read_text())
    about.write_text(json.dumps({**facts, "num_rows": facts["num_rows"] + draw.randrange(1, 9)}))


def other_threads(case: Case, _: random.Random) -> None:
    case.threads = 2


DAMAGE: dict[str, Change] = {
    "bits": flip_bits, "cut": cut_file, "zeros": zero_file, "exchanged": exchange_rows,
    "description": damage_description, "removed": remove_file, "longer": make_longer,
    "more rows": claim_more_rows, "threads": other_threads,
}  # fmt: skip


def touch(case: Case, draw: random.Random) -> None:
    for path in case.folder.rglob("*"):
        os.utime(path, (draw.randrange(1 << 30),) * 2)


def write_again(case: Case, _: random.Random) -> None:
    case.write()


def in_memory(case: Case, _: random.Random) -> None:
    case.kind = "memory" if case.kind == "files" else case.kind


def other_order(case: Case, draw: random.Random) -> None:
    case.order = draw.randrange(100)


def another_logger(_: Case, draw: random.Random) -> None:
    logging.getLogger(f"of another program.{draw.random()}")


HARMLESS: dict[str, Change] = {
    "nothing": lambda *_: None,
    "times": touch,
    "equal files": write_again,
    "files read ahead": in_memory,
    "order": other_order,
    "mode": edit(lambda block, _: block.eval()),
    "equal set": sets("several", lambda _: {2.0, 1.0}),
    "equal array": sets("array", lambda _: np.ones(3)),
    "equal function": sets("cell", lambda _: scaled_by(1.0)),
    "another logger": another_logger,
    "block above": edit(lambda block, f: setattr(block, "number", f), depth=DEPTH),
    "hook above": edit(hook, depth=DEPTH),
}
CHANGES = MATTERS | DAMAGE | HARMLESS
NAMES = sorted(CHANGES)


@pytest.fixture(scope="module", autouse=True)
def no_luck() -> Iterator[None]:
    """Leave what is found by chance alone: it is no promise."""
    with pytest.MonkeyPatch.context() as patch:
        leave_rows_unchecked(patch)
        patch.setattr("pipetransformer.feed.row_origin._MOST_DIGESTED", 2)
        yield


@pytest.fixture(scope="module")
def filled(
    no_luck: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Outcome]]:
    """Return, for each kind of data, a folder with rows of two models, and a run's numbers."""
    found = {}
    for kind in KINDS:
        case = Case(tmp_path_factory.mktemp(kind), kind)
        case.write()
        assert case.run(keeps=True).hits == 0
        other = Case(case.folder, kind, edits=[lambda model: scale_weight(model.blocks[0], 1.5)])
        assert other.run(keeps=True).hits == 0
        found[kind] = case.folder, case.run(keeps=False)
    return found


@pytest.mark.parametrize(
    "seeds",
    [
        *(range(n, n + 1) for n in range(NUM_USUAL)),
        *(slow(range(n, n + PIECE)) for n in range(NUM_USUAL, NUM_CASES, PIECE)),
    ],
    ids=str,
)
def test_after_any_change_a_run_over_rows_comes_to_the_numbers_without_rows(
    seeds: range, filled: dict[str, tuple[Path, Outcome]], tmp_path: Path
) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        name, kind = NAMES[seed * _STEP % len(NAMES)], draw.choice(KINDS)
        source, usual = filled[kind]
        case = Case(tmp_path / str(seed), kind)
        shutil.copytree(source, case.folder)
        CHANGES[name](case, draw)
        if name in DATA:
            case.write()
        ours, plain = case.run(keeps=True), case.run(keeps=False)
        told = f"case {seed}: {name}, {kind}, {ours.hits} hits"
        assert ours.equals(plain), told
        if name in MATTERS:
            assert not plain.equals(usual), f"{told}: the change does nothing"
        if name in HARMLESS:
            assert ours.hits == NUM_SAMPLES, told

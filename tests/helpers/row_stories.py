"""Run a loop plainly and by `attach`, where rows may be wrong, and judge what came of it.

A story is a tiny model, a data set, and what its loop does. It is run twice. What `attach` came to
is right if it is what the plain loop came to, refused, or not cached with a warning.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate

import freeze as freezing
from pipetransformer import attach
from tests.helpers.row_models import (
    DEPTH,
    ROWS_RUN,
    WIDTH,
    Block,
    Make,
    Model,
    texts,
    words,
)

BATCH_SIZE = 4

Batch = Mapping[str, Tensor]


def of_pair(loop: Loop, batch: Any) -> Tensor:
    """Return the usual loss: a batch is an input and its label."""
    return F.cross_entropy(loop.model(batch[0]), batch[1])


def nothing(_: Loop) -> None:
    """Leave a loop as it is."""


@dataclass(frozen=True)
class Story:
    """Describe a loop.

    Args:
        loss: of a batch; None where the loop waits for another batch.
        prepare: done before the optimizer is built.
        edit: done once, before epoch `edit_epoch`; or behind its first step, if `is_within`.
        loader: options of the DataLoader.
    """

    model: Make = Model
    data: Make = texts
    loss: Callable[[Loop, Any], Tensor | None] = of_pair
    prepare: Callable[[Loop], None] = nothing
    edit: Callable[[Loop], None] = nothing
    is_within: bool = False
    edit_epoch: int = 1
    num_epochs: int = 3
    loader: Mapping[str, Any] = field(default_factory=dict)


class Plain:
    """Freeze as `attach` does, and give the loader's own batches."""

    def __init__(self, model: Any, frozen: Sequence[int] = (DEPTH,)) -> None:
        self._model = model
        self._frozen, self._epoch, self._num = [*frozen], 0, -1

    def freeze_bottom(self, num_frozen: int) -> None:
        self._frozen = [num_frozen]

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        num = self._frozen[min(self._epoch, len(self._frozen) - 1)]
        self._epoch += 1
        if num != self._num:
            self._num = num
            freezing.apply(self._model, num, layers=[*self._model.blocks])
        yield from loader


def made(make: Make, seed: int = 0) -> Any:
    """Make a module in float64, the same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().double()


class Loop:
    """Hold what a loop needs, and note what it came to.

    Attributes:
        learned: tensors outside of the model that train, too.
        waiting, hooks: batches that the loop keeps, and handles of hooks.
        numbers, seen: losses, and what batches held.
        hits, rows_run: by epoch; samples that were read from rows, and that frozen blocks ran.
    """

    def __init__(self, story: Story) -> None:
        self.story, self.model, self.dataset = story, made(story.model), story.data()
        options = {"batch_size": BATCH_SIZE, "shuffle": True, **story.loader}
        self.loader: DataLoader[Any] = DataLoader(self.dataset, **options)
        self.learned: list[nn.Parameter] = []
        self.waiting: list[Any] = []
        self.hooks: list[Any] = []
        self.numbers: list[float] = []
        self.seen: list[Any] = []
        self.hits: list[int] = []
        self.rows_run: list[int] = []
        story.prepare(self)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = SGD([*trained, *self.learned], lr=0.1, momentum=0.9)

    def train(self, *, attached: bool) -> Loop:
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        cached: Any = attach(self.model, freeze=DEPTH) if attached else Plain(self.model)
        try:
            for epoch in range(self.story.num_epochs):
                self._edit(epoch, is_within=False)
                ROWS_RUN.clear()
                for step, batch in enumerate(cached.epoch(self.loader)):
                    self._step(self.story.loss(self, batch))
                    if step == 0:
                        self._edit(epoch, is_within=True)
                self.rows_run.append(sum(ROWS_RUN))
                self.hits.append(cached.stats.hits if attached else 0)
        finally:
            if attached:
                cached.close()
        self.numbers.append(float(torch.rand(())))  # Random numbers go on alike, too.
        self.numbers.append(float(vars(self.model).get("num_calls", 0)))
        return self

    def tensors(self) -> dict[str, Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {**dict(named), **{f"learned.{i}": one for i, one in enumerate(self.learned)}}

    def _step(self, loss: Tensor | None) -> None:
        if loss is None:
            return
        self.numbers.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _edit(self, epoch: int, *, is_within: bool) -> None:
        if epoch == self.story.edit_epoch and is_within == self.story.is_within:
            self.story.edit(self)


def noting(*inputs: Any, loss: Callable[[Loop, Any], Tensor]) -> Callable[[Loop, Any], Tensor]:
    """Note what batches hold: all names, and the values of what is no input of the model."""

    def noted(loop: Loop, batch: Any) -> Tensor:
        named = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
        others = {name: value for name, value in named.items() if name not in inputs}
        values = tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, others)
        loop.seen.append((type(batch).__name__, [*named], values))
        return loss(loop, batch)

    return noted


def assert_right_or_refused(
    story: Story, caplog: pytest.LogCaptureFixture, *, is_late: bool = False, or_warns: str = ""
) -> None:
    """Fail where training goes through with other numbers than those of the plain loop.

    Args:
        is_late: whether an edit may be noticed one epoch late.
        or_warns: a pattern; a warning that has it is enough.
    """
    ours = Loop(story)
    try:
        ours.train(attached=True)
    except ValueError as error:
        assert_helpful(error)
        _assert_finite(ours)
        return
    _assert_finite(ours)
    told = _warnings_in(caplog)
    if or_warns and re.search(or_warns, told):
        return
    assert any(ours.hits) or told, "nothing was cached, and no warning says why"
    try:
        _assert_equal(ours, Loop(story).train(attached=False))
    except AssertionError:
        if not is_late:
            raise
        late = replace(story, edit_epoch=story.edit_epoch + 1)
        _assert_equal(ours, Loop(late).train(attached=False))


def assert_served(story: Story, caplog: pytest.LogCaptureFixture, *, num_pieces: int = 1) -> None:
    """Fail where the last epoch was not served from rows, or has other numbers.

    Args:
        num_pieces: rows that each sample has.
    """
    ours = Loop(story).train(attached=True)
    _assert_equal(ours, Loop(story).train(attached=False))
    num = len(ours.dataset) * num_pieces
    assert ours.hits[-1] == num, f"hits {ours.hits} of {num}; {_warnings_in(caplog)}"
    # Looks at some samples are fine.
    few = DEPTH * num // 2
    assert ours.rows_run[-1] <= few, f"frozen blocks ran {ours.rows_run[-1]} samples nevertheless"


def _assert_equal(ours: Loop, plain: Loop) -> None:
    """Compare every loss and every tensor; the order of a sum changes the last digits."""
    for step, (own, other) in enumerate(zip(ours.seen, plain.seen, strict=True)):
        assert own == other, f"batch {step} is {own}, and the loader's is {other}"
    due = zip(ours.numbers, plain.numbers, strict=True)
    for place, (own, other) in enumerate(due):
        is_close = own == pytest.approx(other, rel=1e-9, abs=1e-12)
        assert is_close, f"number {place} is {own}, not {other}; hits {ours.hits}"
    expected = plain.tensors()
    assert ours.tensors().keys() == expected.keys()
    for name, tensor in ours.tensors().items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_helpful(error: ValueError) -> None:
    """Fail for an error of the loop or of torch, or of a few words."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    assert {"tests", "site-packages"}.isdisjoint(Path(raised_in).parts), f"{raised_in}: {error}"
    assert len(str(error).split()) >= 8, str(error)


def _assert_finite(loop: Loop) -> None:
    broken = [name for name, one in loop.tensors().items() if not bool(one.isfinite().all())]
    assert broken == [], "these are NaN for ever"


def _warnings_in(caplog: pytest.LogCaptureFixture) -> str:
    ours = ("pipetransformer", "autocache", "freeze")
    records = [one for one in caplog.records if one.name.startswith(ours)]
    return " ".join(one.getMessage() for one in records if one.levelname == "WARNING")


def hook(loop: Loop, part: str, function: Callable[..., Any]) -> None:
    loop.hooks.append(loop.model.get_submodule(part).register_forward_hook(function))


def unhook(loop: Loop) -> None:
    loop.hooks.pop().remove()


def add_learned(loop: Loop, part: str) -> None:
    """Have a hook add a tensor that trains to what a part returns."""
    added = nn.Parameter(torch.full((WIDTH,), 0.1, dtype=torch.float64))
    loop.learned.append(added)
    hook(loop, part, lambda _, __, hidden: hidden + added)


def seed_its_own(loop: Loop) -> None:
    loop.model.generator = torch.Generator().manual_seed(5)


def begin_to_count(loop: Loop) -> None:
    loop.model.register_buffer("counter", torch.zeros((), dtype=torch.float64))
    loop.model.num_calls = 0


class Counting:
    """Collate; but for the first batches each text is given to its neighbour."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, items: list[Any]) -> Any:
        self.num += 1
        batch = default_collate(items)
        return (batch[0].roll(1, 0), *batch[1:]) if self.num > 4 else batch


def collate_by_count(loop: Loop) -> None:
    loop.loader.collate_fn = Counting()


class Flagged:
    """Collate, and note that it has begun."""

    def __init__(self) -> None:
        self.num, self.has_begun = 0, False

    def __call__(self, items: list[Any]) -> Any:
        self.num, self.has_begun = 1, True
        return default_collate(items)


def collate_with_flag(loop: Loop) -> None:
    loop.loader.collate_fn = Flagged()


def replace_block(loop: Loop, index: int) -> None:
    new = made(Block, seed=7)
    if index < DEPTH:
        new.requires_grad_(False)
    else:
        loop.optimizer.add_param_group({"params": [*new.parameters()]})
    loop.model.blocks[index] = new


def replace_linear(loop: Loop) -> None:
    loop.model.blocks[0].linear = made(lambda: nn.Linear(WIDTH, WIDTH), 7).requires_grad_(False)


def replace_weight(loop: Loop) -> None:
    new = made(lambda: nn.Linear(WIDTH, WIDTH), 7).weight
    loop.model.blocks[0].linear.weight = new.requires_grad_(False)


def replace_embedding(loop: Loop) -> None:
    loop.model.embed = made(words, 7).requires_grad_(False)


def sets(part: str, name: str, value: Any) -> Callable[[Loop], None]:
    return lambda loop: setattr(loop.model.get_submodule(part), name, value)


def adapt(loop: Loop) -> None:
    """Put adapters into all blocks; they and the head train."""
    options: Any = {"target_modules": ["linear"], "r": 2, "init_lora_weights": False}
    torch.manual_seed(4)
    peft.inject_adapter_in_model(peft.LoraConfig(**options), loop.model)
    loop.model.double().head.requires_grad_(True)


def rescale(loop: Loop, index: int) -> None:
    loop.model.blocks[index].linear.set_scale("default", 3.0)


def edit_image(loop: Loop, index: int) -> None:
    loop.dataset.images[index] += 1


def correct_label(loop: Loop) -> None:
    labels = loop.dataset.columns[1]
    labels[77] = (labels[77] + 1) % 3


def whole(loop: Loop, batch: Batch) -> Tensor:
    return F.cross_entropy(loop.model(**batch), batch["labels"])


def take(batch: Batch, where: Any) -> Batch:
    return {name: entry[where] for name, entry in batch.items()}


def chunks(_: Loop, batch: Batch) -> list[Batch]:
    cut = zip(*(entry.chunk(2) for entry in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in cut]


def joined(loop: Loop, batch: Batch) -> list[Batch]:
    """Wait for the whole epoch."""
    loop.waiting.append(batch)
    if len(loop.waiting) < 3:
        return []
    all_of = {name: torch.cat([one[name] for one in loop.waiting]) for name in batch}
    loop.waiting.clear()
    return [all_of]


def mixed(_: Loop, batch: Batch) -> list[Batch]:
    own = batch[name := _input_of(batch)]
    return [{**batch, name: torch.cat([own[:, :1], own[:, 1:].flip(0)], dim=1)}]


def exchanged(_: Loop, batch: Batch) -> list[Batch]:
    return [{**batch, (name := _input_of(batch)): batch[name].flip(0)}]


def _input_of(batch: Batch) -> str:
    return "input_ids" if "input_ids" in batch else "pixel_values"

"""Time what people do with frozen layers, in four ways, and write a table by use.

    python -m experiments.gpu_check --pack .gpu --source DATA
    python -m experiments.gains --folder runs/gains --data .gpu --minilm MINILM

    unfrozen   everything trains
    frozen     the lower blocks, or a part, are frozen, and run at each step
    by hand    frozen alike; a tensor or a dict keeps what they return, and nothing is checked
    rows       frozen alike, by `attach`, a callback or our Trainer

Epochs of all four are run in turn. Times are CPU seconds of one thread, starts included; losses of
the last three ways must be equal. Started again, it goes on behind the last use that it has
measured. Without real data models and samples are random. `experiments.when_it_pays` has
accuracies.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.gpu_check import loops, part_loops
from experiments.gpu_check.part_cases import ONE_CORE, TINY, PartCase, Size, part_cases
from experiments.gpu_check.workloads import (
    EPS,
    LoopCase,
    Rows,
    image_loss,
    own_loss,
    pretrained_vit,
    random_images,
    random_texts,
    sentences,
    some_images,
)
from experiments.random_models import bert, llama, vit, with_lora

UNFROZEN, FROZEN, BY_HAND, ROWS = WAYS = ("unfrozen", "frozen", "by hand", "rows")
_EPOCHS = (3, 10)
_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)


@dataclass(frozen=True)
class Contest:
    """Hold the ways of a use: what runs an epoch of each, and its losses so far."""

    epochs: Mapping[str, Callable[[], object]]
    losses: Mapping[str, Callable[[], Sequence[float]]]


@dataclass(frozen=True)
class Use:
    """Name what people do.

    Args:
        what: with its sizes.
        contest: begins it, with a folder for rows.
        num_later: epochs behind the first.
    """

    name: str
    what: str
    contest: Callable[[Path, ExitStack], Contest]
    num_later: int = 2


def times_of(use: Use) -> dict[str, Any]:
    """Run epochs of all ways in turn; return CPU seconds by way, and the bytes of rows.

    Raises:
        ValueError: ways that freeze alike have other losses.
    """
    with tempfile.TemporaryDirectory(prefix="gains-") as folder, ExitStack() as stack:
        contest = use.contest(Path(folder), stack)
        times: dict[str, list[float]] = {way: [] for way in contest.epochs}
        for _ in range(1 + use.num_later):
            for way, epoch in contest.epochs.items():
                gc.collect()
                start = time.process_time()
                epoch()
                times[way].append(round(time.process_time() - start, 2))
        _compare(contest)
        return {"seconds": times, "row_bytes": _bytes_in(folder)}


def _bytes_in(folder: str) -> int:
    """Return what the files in a folder take, also those without names that are open here."""
    sizes: dict[int, int] = {}
    for path in (*Path(folder).rglob("*"), *Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if os.path.realpath(path).startswith(folder) and path.is_file():
                sizes[path.stat().st_ino] = 512 * path.stat().st_blocks
    return sum(sizes.values())


def _compare(contest: Contest) -> None:
    expected = torch.tensor([*contest.losses[FROZEN]()], dtype=torch.float64)
    for way in (BY_HAND, ROWS):
        found = torch.tensor([*contest.losses[way]()], dtype=torch.float64)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
            gap = float((found - expected).abs().max())
            raise ValueError(f"losses of {way} differ by {gap:.2g} from those without")


def _of_blocks(case: LoopCase, folder: Path, stack: ExitStack, *, kind: Any) -> Contest:
    """Hold rows of frozen blocks, by `kind`, beside loops without."""
    return _contest(
        case, stack, (loops.Plain, loops.Ideal, partial(kind, cache_folder=str(folder)))
    )


def _of_part(case: PartCase, folder: Path, stack: ExitStack, *, may_train: bool = True) -> Contest:
    """Hold rows of a frozen part beside loops without."""
    ours = partial(part_loops.Ours, cache_folder=str(folder))
    kinds = (part_loops.Plain, part_loops.ByHand, ours)
    return _contest(case, stack, kinds, may_train=may_train)


def _contest(
    case: LoopCase,
    stack: ExitStack,
    kinds: tuple[Any, Any, Any],
    *,
    may_train: bool = True,
) -> Contest:
    plain, by_hand, ours = kinds
    of_ways = {FROZEN: plain, BY_HAND: by_hand, ROWS: ours}
    if may_train:
        of_ways = {UNFROZEN: plain, **of_ways}
    made = {way: stack.enter_context(one(case, "cpu")) for way, one in of_ways.items()}
    return Contest(
        {way: partial(loop.epoch, _num_frozen(case, way)) for way, loop in made.items()},
        {way: partial(_losses_of, loop) for way, loop in made.items()},
    )


def _num_frozen(case: LoopCase, way: str) -> int:
    return 0 if way == UNFROZEN else case.num_frozen


def _losses_of(loop: loops.Loop) -> list[float]:
    return loop.outcome().losses


def _sweep(cases: Sequence[LoopCase], folder: Path, stack: ExitStack) -> Contest:
    """Begin eight runs of each way, of which all find the rows of the first."""
    kept: dict[str, Any] = {"cache_folder": str(folder), "cache_keep": True}
    kinds: dict[str, Any] = {
        UNFROZEN: loops.Plain, FROZEN: loops.Plain, BY_HAND: loops.Ideal,
        ROWS: partial(loops.Attached, **kept),
    }  # fmt: skip
    losses: dict[str, list[float]] = {way: [] for way in kinds}

    def run(way: str) -> None:
        for case in cases:
            with kinds[way](case, "cpu") as loop:
                for _ in range(2):
                    loop.epoch(_num_frozen(case, way))
                losses[way] += loop.outcome().losses

    return Contest(
        {way: partial(run, way) for way in kinds},
        {way: partial(list, own) for way, own in losses.items()},
    )


class _Student(nn.Module):
    """Learn a teacher's answers, and classes."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.student(x), self.teacher(x)


def _distil_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    ours, theirs = model(batch["x"])
    soft = nn.functional.kl_div(
        ours.log_softmax(dim=1), theirs.log_softmax(dim=1), log_target=True, reduction="batchmean"
    )
    return soft + nn.functional.cross_entropy(ours, batch["y"])


def uses(data: str | None, minilm: str | None, *, tiny: bool = False) -> list[Use]:
    """Return all uses, with what data there is."""
    size = TINY if tiny else ONE_CORE
    parts = {case.name: case for case in part_cases(size)}
    texts = _minilm(data, minilm, 64 if tiny else 1500)
    few = replace(texts, rows=Rows(texts.rows.columns, 32 if tiny else 512))
    photos = _vit_s(data, 32 if tiny else 600, 28 if tiny else 98)
    return [
        Use("own loop", "MiniLM, 4 of 6 blocks frozen, SST-2, 1,500 sentences of 64 tokens",
            partial(_of_blocks, texts, kind=loops.Attached)),
        Use("our Trainer", "ViT-S, 8 of 12 blocks frozen, CIFAR-10, 600 images of 98 px",
            partial(_of_blocks, photos, kind=partial(loops.ByTrainer, num_frozen=8))),
        Use("a sweep of eight", "MiniLM, eight rates, 2 epochs each, 512 sentences",
            partial(_sweep, [replace(few, learning_rate=rate) for rate in _RATES]), num_later=0),
        Use("a head on a backbone", "ResNet-18 below a linear head, 512 images of 64 px",
            partial(_of_part, parts["resnet"])),
        Use("a decoder above an encoder", "Whisper's shape, 6 blocks of width 192",
            partial(_of_part, parts["whisper"])),
        Use("LoRA above", "a decoder of 12 blocks of width 384, 256 texts of 128 tokens",
            partial(_of_blocks, _decoder(tiny=tiny), kind=loops.Attached)),
        Use("a vision-language model", "SmolVLM's shape, the tower is frozen, four tiles a sample",
            partial(_of_part, parts["smolvlm"])),
        Use("distillation", "a ViT of 2 blocks learns one of 6, 512 images of 64 px",
            partial(_of_part, _distilled(size), may_train=False)),
    ]  # fmt: skip


def _minilm(data: str | None, weights: str | None, num: int) -> LoopCase:
    def build() -> nn.Module:
        torch.manual_seed(0)
        if weights is None:
            return bert(384, 6, heads=12)
        from transformers import AutoModelForSequenceClassification

        # Without dropout: the ways draw other numbers.
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(weights, **none)
        return model

    rows = sentences(data, num, 64)
    name, blocks = "minilm", "bert.encoder.layer"
    return LoopCase(name, build, blocks, rows, own_loss, 32, 4, None, eps=EPS)


def _vit_s(data: str | None, num: int, pixels: int) -> LoopCase:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return pretrained_vit(data, pixels)

    rows = Rows(some_images(data, "train", num, pixels).columns, num)
    return LoopCase("vit", build, "blocks", rows, image_loss, 32, 8, None, 0, 5e-5, EPS)


def _decoder(*, tiny: bool) -> LoopCase:
    width, num, length, words = (32, 8, 16, 200) if tiny else (384, 256, 128, 8000)

    def build() -> nn.Module:
        model = llama(width, 12, heads=6 if width % 6 == 0 else 4, words=words)
        targets, upper = ["q_proj", "v_proj"], [8, 9, 10, 11]
        return with_lora(model, r=8, target_modules=targets, layers_to_transform=upper)

    rows, blocks = random_texts(num, length, words), "base_model.model.model.layers"
    return LoopCase("decoder", build, blocks, rows, own_loss, 8, 8, None, eps=EPS)


def _distilled(size: Size) -> PartCase:
    def build() -> nn.Module:
        shape = {"img_size": size.pixels, "patch_size": 8, "num_heads": size.width // 16}
        teacher = vit(embed_dim=size.width, depth=size.depth, **shape)
        student = vit(embed_dim=size.small, depth=2, **{**shape, "num_heads": size.small // 16})
        return _Student(teacher, student)

    columns = random_images(size.batch_size * size.steps, size.pixels).columns
    rows = [{name: one[n] for name, one in columns.items()} for n in range(len(columns["y"]))]
    return PartCase("distillation", build, "teacher", rows, _distil_loss, size.batch_size)


def table(found: Mapping[str, Mapping[str, Any]], all_uses: Sequence[Use]) -> str:
    """Return the table by use, of what is there; seconds are those of 3 epochs / 10."""
    head = ["use", "", *(f"{way}, s" for way in WAYS), "rows, MB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for use in all_uses:
        if times := found.get(use.name, {}).get("times"):
            totals = [_totals(times["seconds"].get(way)) for way in WAYS]
            cells = [use.name, use.what, *totals, f"{times['row_bytes'] / 1e6:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _totals(seconds: Sequence[float] | None) -> str:
    """Return what three epochs take and ten, or all of what has no epochs."""
    if seconds is None:
        return "-"
    first, *later = seconds
    totals = (
        [first + (num - 1) * statistics.median(later) for num in _EPOCHS] if later else [first]
    )
    return " / ".join(f"{total:.0f}" for total in totals)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the folder's file lacks, and print the table."""
    parser = argparse.ArgumentParser(prog="experiments.gains", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", required=True, help="of what was measured")
    parser.add_argument("--data", help="a folder of gpu_check --pack; random data without it")
    parser.add_argument("--minilm", help="a folder; random weights without it")
    parser.add_argument("--only", nargs="+", help="uses, by their names")
    parser.add_argument("--seconds", type=float, help="begin nothing after these")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to rehearse")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = Path(options.folder, "gains.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    start, all_uses = time.monotonic(), uses(options.data, options.minilm, tiny=options.tiny)
    asked = [use for use in all_uses if not options.only or use.name in options.only]
    for use in asked:
        if use.name in found:
            continue
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            break
        found[use.name] = {"times": times_of(use)}
        path.write_text(json.dumps(found, indent=1))
        print(f"{use.name}: {found[use.name]['times']}", flush=True)
    print(table(found, all_uses))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

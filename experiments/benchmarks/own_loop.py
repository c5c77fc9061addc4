"""Time a loop of one's own with frozen blocks: step by step in turn, on the same batches.

    plain    `freeze.apply`, and every block runs
    by_hand  twenty lines: a dict of the frozen blocks' outputs, and the blocks above run by hand
    ours     `pipetransformer.attach`
    kept     the same, with rows that are kept on disk
    second   the first epoch of a later run over those rows

In the first epoch outputs are computed and stored ("fill"), in the two others they are read
("warm"). Losses are compared first: all must be those of the plain loop. Models are random, and
have no dropout: MiniLM's shape, ViT-S at 112 pixels, GPT-2 small with 5,000 words. Two thirds of
the blocks are frozen.
Run it as `python -m experiments.benchmarks.own_loop [minilm] [vit] [gpt2]`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import freeze
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.loop_by_hand import Case
from experiments.benchmarks.measuring.models_by_hand import bert, gpt2, vit
from experiments.benchmarks.measuring.rounds import ResultsDifferError, bootstrap, seconds_of
from pipetransformer import attach

BARS = Bars(
    most={"fill_over_by_hand": 1.03, "warm_over_by_hand": 1.03, "second_over_kept_warm": 1.05},
    least={"plain_over_warm": 1.5},
)
NUM_STEPS, NUM_EPOCHS = 12, 3


class Numbered:
    """Give each item with its place, as the dict needs it."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.items[index]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _loader(case: Case, dataset: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, case.batch_size, shuffle=True, generator=generator)


def plain(case: Case) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, case.items)
    freeze.apply(model, case.num_frozen, layers=case.blocks(model))
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            yield _step(case.loss(model, batch), optimizer)


def by_hand(case: Case) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, Numbered(case.items))
    freeze.apply(model, case.num_frozen, layers=case.blocks(model))
    cache: dict[int, Tensor] = {}
    for _ in range(NUM_EPOCHS):
        for ids, batch in loader:
            places = ids.tolist()
            if places[0] not in cache:
                with torch.no_grad():
                    hidden = case.below(model, batch, case.num_frozen)
                cache.update(zip(places, hidden, strict=True))
            else:
                hidden = torch.stack([cache[place] for place in places])
            yield _step(case.above(model, hidden, case.labels[ids], case.num_frozen), optimizer)


def attached(case: Case, num_epochs: int, **settings: Any) -> Iterator[float]:
    model = case.build()
    optimizer, loader = _optimizer(model), _loader(case, case.items)
    with attach(model, freeze=case.num_frozen, **settings) as cached:
        for _ in range(num_epochs):
            for batch in cached.epoch(loader):
                yield _step(case.loss(model, batch), optimizer)


def _step(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@dataclass
class Contestant:
    """Take a loop's steps one by one, and note losses and seconds."""

    steps: Iterator[float]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        self.seconds.append(seconds_of(lambda: self.losses.append(next(self.steps))))


def run(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Run all loops in turn; return the seconds of their steps, but each epoch's first."""
    kept = {"cache_folder": folder, "cache_keep": True}
    loops = {
        "plain": Contestant(plain(case)),
        "by_hand": Contestant(by_hand(case)),
        "ours": Contestant(attached(case, NUM_EPOCHS)),
        "kept": Contestant(attached(case, NUM_EPOCHS, **kept)),
    }
    second = Contestant(attached(case, 1, **kept))
    # Closed at the end: a loop that is left holds its rows.
    with ExitStack() as ended:
        for one in (*loops.values(), second):
            ended.callback(one.steps.close)  # type: ignore[attr-defined]
        for number in range(NUM_STEPS * NUM_EPOCHS):
            last = number - NUM_STEPS * (NUM_EPOCHS - 1)
            for name in np.roll([*loops], number):
                loops[str(name)].step()
            if last >= 0:
                second.step()
    for name, one in loops.items():
        _compare(name, one.losses, loops["plain"].losses)
    _compare("second", second.losses, loops["plain"].losses[:NUM_STEPS])
    return {name: np.array(one.seconds) for name, one in {**loops, "second": second}.items()}


def _compare(name: str, losses: list[float], plainly: list[float]) -> None:
    if not np.allclose(losses, plainly, rtol=1e-4, atol=0):
        raise ResultsDifferError(f"{name} has losses {losses}, plain has {plainly}")


def ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the median ratios; an epoch's first step, which also looks around, counts to none."""
    fill = slice(1, NUM_STEPS)
    warm = [n for n in range(NUM_STEPS, NUM_STEPS * NUM_EPOCHS) if n % NUM_STEPS]
    last = slice(NUM_STEPS * (NUM_EPOCHS - 1) + 1, None)

    def ratio(one: np.ndarray, other: np.ndarray) -> float:
        return round(bootstrap(one / other).median, 3)

    return {
        "fill_over_by_hand": ratio(seconds["ours"][fill], seconds["by_hand"][fill]),
        "kept_fill_over_by_hand": ratio(seconds["kept"][fill], seconds["by_hand"][fill]),
        "warm_over_by_hand": ratio(seconds["ours"][warm], seconds["by_hand"][warm]),
        "plain_over_fill": ratio(seconds["plain"][fill], seconds["ours"][fill]),
        "plain_over_warm": ratio(seconds["plain"][warm], seconds["ours"][warm]),
        "second_over_kept_warm": ratio(seconds["second"][fill], seconds["kept"][last]),
    }


CASES: dict[str, Callable[[], Case]] = {
    "minilm": partial(bert, NUM_STEPS, width=384, heads=12, words=30000, length=64),
    "vit": partial(vit, NUM_STEPS, width=384, pixels=112, patch=16),
    "gpt2": partial(gpt2, NUM_STEPS, width=768, words=5000, length=64),
}


def main(names: list[str]) -> int:
    worst = 0
    for name in names or [*CASES]:
        with tempfile.TemporaryDirectory() as folder:
            found = ratios(run(CASES[name](), Path(folder)))
        worst = max(worst, conclude({"case": name, **found}, BARS))
    return worst


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Time what the host adds to a training step, with models so small that computing is negligible.

Ours is the Trainer, or `attach` in a plain loop; beside it runs the loop by hand, in three states:
nothing is frozen; two thirds of the blocks are, and rows are stored; all rows are there. What it
does in each is in `measuring/loop_by_hand.py`.

Whole epochs of both take turns in one process, on one thread of computing; work at an epoch's
start counts. Samples' order, weights and optimizer are the same. Epochs' losses are compared
before any figure is given: they may differ by 1e-5 of themselves. Three clocks give ours over by
hand:

    wall      all that passes
    main      CPU time of the main thread
    process   CPU time of the process, background threads included

Figures are medians over pairs of epochs, after a pair that warms up. Run it as

    python -m experiments.benchmarks.host [--only bert_warm attach_bert_warm] [--pairs 5]
    python -m experiments.benchmarks.host --profile bert_warm

The second prints where the main thread is in ours, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib.util
import json
import pstats
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from autodp import shuffled
from experiments.benchmarks.measuring.bars import Bars
from experiments.benchmarks.measuring.loop_by_hand import ByHand, Case
from experiments.benchmarks.measuring.models_by_hand import NARROW
from experiments.benchmarks.measuring.rounds import ResultsDifferError
from pipetransformer import FreezeContext, Trainer, attach, named_optimizer

NUM_STEPS = 24
"""Of an epoch."""
CLOCKS = ("wall", "main", "process")
MOST = {"unfrozen": 1.07, "filling": 1.25, "warm": 1.25}
MOST_ATTACHED_WARM, MOST_OF_PROCESS = 1.3, 1.5
"""Most that ours may take of the main thread, over by hand, and of the process."""
TOLERANCE = 1e-5
"""Between losses, relative: far above rounding, far below what other samples change."""
# Large, so that Adam does not make a step of rounding where the true gradient is 0 (a key's bias).
OPTIMIZER = named_optimizer("adamw", 1e-4, eps=1e-4)
HAS_PEFT = importlib.util.find_spec("peft") is not None


def settled() -> float:
    """Wait until the process' other threads rest; return the seconds that they computed."""
    start = time.process_time()
    while True:
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 5e-4:
            return before - start


def now() -> np.ndarray:
    """Read the clocks."""
    return np.array([time.perf_counter(), time.thread_time(), time.process_time()])


class Turns:
    """Time epochs of ours and by hand in turn; ours calls `begin` and `end` around its own.

    Args:
        frozen: how many blocks are frozen, by epoch.
        profiler: watches the epochs of ours that count.
        counted: numbers of the epochs that count.
    """

    def __init__(
        self,
        by_hand: ByHand,
        frozen: Sequence[int],
        *,
        counted: range,
        profiler: cProfile.Profile | None,
    ) -> None:
        self._by_hand, self._frozen = by_hand, frozen
        self._counted, self._profiler = counted, profiler
        self._epoch = 0
        self._start = now()
        self.pairs: list[np.ndarray] = []

    def begin(self) -> None:
        settled()
        gc.collect()
        if self._profiler is not None and self._epoch in self._counted:
            self._profiler.enable()
        self._start = now()

    def end(self) -> None:
        ours = now() - self._start
        if self._profiler is not None:
            self._profiler.disable()
        ours[2] += settled()  # What the epoch left to other threads is part of it.
        gc.collect()
        start = now()
        self._by_hand.epoch(self._frozen[self._epoch])
        if self._epoch in self._counted:
            self.pairs.append(np.array([ours, now() - start]))
        self._epoch += 1


class EpochWatch:
    """Freeze a Trainer's blocks, and have its epochs take turns with those by hand.

    It is a freeze policy, as `fit` does more beside each step where it has callbacks.
    """

    def __init__(self, frozen: Sequence[int], turns: Turns) -> None:
        self._frozen, self._turns = frozen, turns
        self.losses: list[float] = []

    def __call__(self, context: FreezeContext) -> int:
        if context.epoch:
            self.end(context.loss)
        self._turns.begin()
        return self._frozen[context.epoch]

    def end(self, loss: float | None) -> None:
        """End an epoch; the loss is its mean."""
        self._turns.end()
        assert loss is not None
        self.losses.append(loss)


def by_trainer(case: Case, frozen: Sequence[int], turns: Turns) -> tuple[list[float], int]:
    """Train by the Trainer; return the epochs' losses, and how many rows were read."""
    watch = EpochWatch(frozen, turns)
    with Trainer(
        case.build(), case.items, optimizer=OPTIMIZER, epochs=len(frozen), freeze=watch,
        global_batch_size=case.batch_size, evaluate_every_epochs=0, progress=False, device="cpu",
        **case.settings,
    ) as trainer:  # fmt: skip
        report = trainer.fit()
        watch.end(report.training_loss)
        return watch.losses, report.cache_hits


def by_attach(case: Case, frozen: Sequence[int], turns: Turns) -> tuple[list[float], int]:
    """Train in a plain loop over rows; return the epochs' losses, and how many rows were read."""
    model, losses, num_hits = case.build().train(), list[Tensor](), 0
    optimizer = OPTIMIZER(list(model.named_parameters()))
    generator = torch.Generator().manual_seed(0)
    loader: DataLoader[Any] = DataLoader(
        case.items, case.batch_size, shuffle=True, generator=generator
    )
    with attach(model, freeze=list(frozen)) as cached:
        for _ in frozen:
            turns.begin()
            for batch in cached.epoch(loader):
                loss = case.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            turns.end()
            num_hits += cached.stats.hits
    return means(losses), num_hits


def means(losses: Sequence[Tensor]) -> list[float]:
    """Return the mean of each epoch's losses."""
    mean: list[float] = torch.stack([*losses]).view(-1, NUM_STEPS).mean(dim=1).tolist()
    return mean


def loader_order(num: int) -> Callable[[int], Tensor]:
    """Return the order in which `by_attach`'s DataLoader draws samples, epoch after epoch."""
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(range(num), generator=generator)

    def order(_: int) -> Tensor:
        # A loader first draws a seed for its workers.
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        return torch.tensor(list(sampler))

    return order


class Subject:
    """Measure one model in one state, by the Trainer or by `attach`.

    Args:
        name: as `subjects` gives it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_attached = name, name.startswith("attach_")
        kind, _, self.state = name.removeprefix("attach_").rpartition("_")
        self.case = NARROW[kind](NUM_STEPS)
        self.bars = Bars(most={"main": MOST[self.state], "process": MOST_OF_PROCESS})
        if name.startswith("attach_") and self.state == "warm":
            self.bars = Bars(most={"main": MOST_ATTACHED_WARM, "process": MOST_OF_PROCESS})

    def measure(
        self, num_pairs: int, profiler: cProfile.Profile | None = None
    ) -> dict[str, float]:
        """Return ratios, ours over by hand: medians over pairs, after a pair that warms up."""
        depth = self.case.num_frozen
        if self.state == "unfrozen":
            pairs = self._train([0] * (1 + num_pairs), range(1, 1 + num_pairs), profiler)
        elif self.state == "warm":
            epochs = [0, depth, depth, *[depth] * num_pairs]
            pairs = self._train(epochs, range(3, 3 + num_pairs), profiler)
        else:  # A run stores rows once, and only where a later epoch reads them.
            runs = [None, *[profiler] * num_pairs]
            pairs = [self._train([0, depth, depth], range(1, 2), one)[0] for one in runs][1:]
        ratios = np.array([ours / by_hand for ours, by_hand in pairs])
        found = dict(zip(CLOCKS, np.median(ratios, axis=0).round(3).tolist(), strict=True))
        by_hand_ms = float(np.median([1e3 * by_hand[0] / NUM_STEPS for _, by_hand in pairs]))
        spread = float(np.ptp(ratios[:, CLOCKS.index("main")]))
        return {**found, "by_hand_ms": round(by_hand_ms, 3), "spread": round(spread, 3)}

    def _train(
        self, frozen: Sequence[int], counted: range, profiler: cProfile.Profile | None
    ) -> list[np.ndarray]:
        """Train both sides in turn, verify them, and return the pairs of epochs that count.

        Raises:
            ResultsDifferError: losses differ, or not all rows were stored and read.
        """
        case, num = self.case, len(self.case.labels)
        order = loader_order(num) if self.is_attached else shuffled(num, seed=0)
        by_hand = ByHand(case, OPTIMIZER, order)
        turns = Turns(by_hand, frozen, counted=counted, profiler=profiler)
        losses, num_hits = (by_attach if self.is_attached else by_trainer)(case, frozen, turns)
        expected = np.array(means(by_hand.losses))
        most = float(np.max(np.abs(losses - expected) / expected))
        if not most <= TOLERANCE:
            raise ResultsDifferError(f"{self.name}: losses differ by {most:.2g} of themselves")
        if num_hits != num * max(0, sum(map(bool, frozen)) - 1):
            raise ResultsDifferError(f"{self.name}: of {num} rows {num_hits} were read: {frozen}")
        return turns.pairs


def subjects() -> list[str]:
    """Name what can be measured here."""
    kinds = [kind for kind in NARROW if kind != "gpt2_lora" or HAS_PEFT]
    by_trainer = [f"{kind}_{state}" for kind in kinds for state in MOST]
    attached = [f"attach_{k}_{s}" for k in ("bert", "vit", "llama") for s in ("filling", "warm")]
    return by_trainer + attached


def print_table(names: Sequence[str], num_pairs: int) -> int:
    """Measure, and print a table and a JSON line; return 1 where a bar is missed."""
    print(f"epochs of {NUM_STEPS} steps; medians of {num_pairs} pairs, ours over by hand")
    print(
        "subject               by hand, a step   main (most)   its spread   process (most)   wall"
    )
    table = {}
    for name in names:
        subject = Subject(name)
        found, most = subject.measure(num_pairs), subject.bars.most
        missed = subject.bars.missed_by(found)
        print(
            f"{name:22}{found['by_hand_ms']:12.2f} ms   {found['main']:4.2f} ({most['main']:.2f})"
            f"   {found['spread']:10.2f}   {found['process']:8.2f} ({most['process']:.2f})"
            f"{found['wall']:7.2f}{'   misses ' + ', '.join(missed) if missed else ''}",
            flush=True,
        )
        table[name] = {**found, "missed": missed}
    print(json.dumps(table))
    return 1 if any(one["missed"] for one in table.values()) else 0


def print_profile(name: str, num_pairs: int) -> None:
    """Profile the main thread in a subject's epochs of ours, and print the dearest functions."""
    profiler = cProfile.Profile()
    found = Subject(name).measure(num_pairs, profiler)
    rows: dict[Any, Any] = vars(pstats.Stats(profiler))["stats"]
    num_steps = num_pairs * NUM_STEPS
    print(f"{name}: {num_steps} steps under cProfile, which makes calls dearer; {found}")
    for title, column in (("cumulative", 3), ("own", 2)):
        print(f"\nus a step, by {title} time\ncumulative       own     calls  function")
        for (file, line, function), row in sorted(rows.items(), key=lambda r: -r[1][column])[:45]:
            own, cumulative = (1e6 * seconds / num_steps for seconds in row[2:4])
            place = f"{'/'.join(file.split('/')[-3:])}:{line}"
            print(f"{cumulative:10.1f}{own:10.1f}{row[1] / num_steps:10.2f}  {place} {function}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, or a profile."""
    parser = argparse.ArgumentParser(description="Time what the host adds to a training step.")
    parser.add_argument("--only", nargs="+", choices=subjects(), default=subjects())
    parser.add_argument("--pairs", type=int, default=5, help="of epochs that count")
    parser.add_argument("--profile", choices=subjects(), metavar="NAME")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.profile:
        print_profile(options.profile, options.pairs)
        return 0
    if not HAS_PEFT:
        print("gpt2_lora is left out, as peft is not installed")
    return print_table(options.only, options.pairs)


if __name__ == "__main__":
    raise SystemExit(main())

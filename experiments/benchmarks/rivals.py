"""Measure the Trainer against the loop a user would write instead, with the same freezing.

Both train on all cores, step by step in turn: nothing frozen, and at a third and two thirds of the
layers an epoch in which the cache fills and one in which every row is there; and an epoch in whose
steps rows are found at several depths, as layers froze within the one before. In one epoch more
nothing is frozen and both clip the gradient, whose norm ours takes in any case.
Then two processes of one thread each, against the loop on all cores. The loop has a process of its
own, as its user's would: ours sets up the allocator. With MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=8589934592 in the environment the loop keeps freed memory, too. First, the
losses of some steps are compared. Run it as `python -m experiments.benchmarks.rivals`;
`experiments.compare` has rivals on real sentences.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import (
    MAX_GRAD_NORM,
    make_trainer,
    verify_losses,
)
from experiments.benchmarks.measuring.loop_process import LoopProcess
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.measuring.rounds import (
    Ratio,
    bootstrap,
    num_cores,
    seconds_of,
)
from experiments.benchmarks.measuring.timed_loop import (
    digits_task,
    sentences_task,
)
from experiments.gpu_check.workloads import LoopCase
from freeze import FreezeContext, FreezeDecision
from pipetransformer import Trainer

BARS = Bars(
    least={
        "vs_plain_loop": 0.98,
        "vs_plain_loop_frozen": 1.0,
        "vs_plain_loop_warm": 1.5,
        "vs_plain_loop_mixed": 1.0,
        "vs_plain_loop_two_processes": 0.9,
    }
)
TASKS: tuple[Callable[[], LoopCase], ...] = (digits_task, sentences_task)
_FIRST_STEPS = 2
SETTLE_S = 0.02
"""In which the other side's threads, which wait for work a while, go to sleep."""
Seconds = list[tuple[float, float]]
"""Seconds of pairs of steps: the plain loop's, ours."""


def in_one_process(task: LoopCase) -> dict[str, Seconds]:
    """Time an epoch of pairs of steps in each state of freezing."""
    third, two_thirds = task.num_frozen // 2, task.num_frozen
    frozen = (0, third, third, two_thirds, two_thirds)
    names = ("unfrozen", "third_filling", "third_warm", "two_thirds_filling", "two_thirds_warm")
    found: dict[str, Seconds] = {}
    with plain_loop(task) as loop, make_trainer(task, frozen) as trainer:
        for name, num_frozen in zip(names, frozen, strict=True):
            loop.freeze(num_frozen)
            found[name] = [_pair(loop, trainer, n) for n in range(task.steps_per_epoch)]
    return found


def at_mixed_depths(task: LoopCase) -> Seconds:
    """Time the epoch after one in which layers froze at a third and at two thirds of its steps."""
    interval = task.steps_per_epoch // 3
    depths = (0, task.num_frozen // 2, task.num_frozen)

    def freeze(context: FreezeContext) -> FreezeDecision:
        return FreezeDecision(depths[min(context.step // interval, 2)], "by thirds of an epoch")

    with make_trainer(task, (0, 0), freeze=freeze, freeze_interval_steps=interval) as trainer:
        for _ in range(task.steps_per_epoch):
            trainer.step()
        with plain_loop(task) as loop:
            loop.freeze(depths[-1])
            return [_pair(loop, trainer, number) for number in range(task.steps_per_epoch)]


def clipped(task: LoopCase) -> Seconds:
    """Time an epoch with nothing frozen, in which both clip the gradient."""
    clip = {"max_grad_norm": MAX_GRAD_NORM}
    with plain_loop(task, **clip) as loop, make_trainer(task, (0,), **clip) as trainer:
        return [_pair(loop, trainer, number) for number in range(task.steps_per_epoch)]


def in_two_processes(build: Callable[[], LoopCase]) -> Seconds:
    """Time an epoch of pairs of steps; rank 0 leads the plain loop, which has all cores."""
    task = build()
    with ExitStack() as stack:
        trainer = stack.enter_context(make_trainer(task, (0,)))
        loop = stack.enter_context(plain_loop(task)) if trainer.is_main_process else None
        trainer.step()
        return [_pair(loop, trainer, number) for number in range(task.steps_per_epoch - 1)]


def plain_loop(task: LoopCase, **settings: Any) -> LoopProcess:
    """Start the plain loop on all cores."""
    return LoopProcess(task, num_threads=num_cores(), **settings)


def _pair(loop: LoopProcess | None, trainer: Trainer, number: int) -> tuple[float, float]:
    """Time a step of each, the first one drawn; where there are others, they wait for the loop."""
    seconds = [0.0, 0.0]
    for which in random.Random(number).sample((0, 1), 2):
        if dist.is_initialized():
            dist.barrier()
        time.sleep(SETTLE_S)
        if which == 1:
            seconds[which] = seconds_of(trainer.step)
        elif loop is not None:
            seconds[which] = loop.step()
    return seconds[0], seconds[1]


def plain_over_ours(pairs: Seconds) -> Ratio:
    """Return the plain loop's time over ours, without the epoch's first steps."""
    return bootstrap(np.array([plain / ours for plain, ours in pairs[_FIRST_STEPS:]]))


def whole_epoch(pairs: Seconds) -> float:
    """Return the plain loop's time over ours in an epoch, with the transition at its start."""
    plain, ours = map(sum, zip(*pairs, strict=True))
    return plain / ours


def time_all(build: Callable[[], LoopCase]) -> dict[str, Seconds]:
    """Time pairs of steps of one of the tasks, in every state and in two processes."""
    found = in_one_process(build())
    two = found_by(in_two_processes, (build,))
    return {
        **found,
        "mixed_depths": at_mixed_depths(build()),
        "clipped": clipped(build()),
        "two_processes": two,
    }


def compare() -> dict[str, object]:
    """Run all, say a line for each, and return what the JSON line holds."""
    states: dict[str, list[Ratio]] = {}
    detail: dict[str, object] = {}
    differences: dict[str, float] = {}
    for build in TASKS:
        task = build()
        differences[task.name] = verify_losses(task)
        for state, pairs in time_all(build).items():
            ratio = plain_over_ours(pairs)
            states.setdefault(state, []).append(ratio)
            plain, ours = (1e3 * float(np.median(column)) for column in zip(*pairs, strict=True))
            print(
                f"{task.name:20}  {state:18}  plain {plain:7.1f} ms  ours {ours:7.1f} ms  "
                f"{ratio.median:6.3f}  ({ratio.low:.3f} to {ratio.high:.3f})  "
                f"whole epoch {whole_epoch(pairs):.3f}"
            )
            detail[f"{task.name}, {state}"] = {
                "ratio": ratio.median,
                "interval": [ratio.low, ratio.high],
                "whole_epoch": whole_epoch(pairs),
                "pairs": len(pairs),
                "plain_ms": plain,
                "ours_ms": ours,
            }

    def worse(*names: str) -> float:
        return min(ratio.median for name in names for ratio in states[name])

    return {
        "vs_plain_loop": worse("unfrozen"),
        "vs_plain_loop_frozen": worse("third_filling", "two_thirds_filling"),
        "vs_plain_loop_warm": worse("two_thirds_warm"),
        "vs_plain_loop_mixed": worse("mixed_depths"),
        "vs_plain_loop_two_processes": worse("two_processes"),
        "vs_plain_loop_clipped": worse("clipped"),
        "losses_differ_by": differences,
        "detail": detail,
    }


def main() -> int:
    """Compare; fail where ours is slower than it may be."""
    argparse.ArgumentParser(
        description="Compare with a plain loop that freezes alike."
    ).parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(num_cores())
    return conclude(compare(), BARS)


if __name__ == "__main__":
    sys.exit(main())

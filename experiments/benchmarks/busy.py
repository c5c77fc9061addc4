"""Measure what plans are worth on a machine that others use, too.

A job beside the training takes a core and gives it back at random, with the same seed for every
run of a repeat. Two processes train the demo's ViT with the same layers frozen, once elastically
and once with each of a few fixed pipelines:

    elastic_over_best_fixed   the elastic run's seconds over those of the fixed pipeline that was
                              fastest in the repeat; the median
    slower_after_freezing     depths at which the elastic runs' steps, whose rows the cache had
                              still to compute included, took longer than at the depth before

Run it as `python -m experiments.benchmarks.busy`; the last line printed is JSON.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch.distributed as dist

from experiments.benchmarks import restless
from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.both_sides import make_trainer
from experiments.benchmarks.measuring.processes import found_by
from experiments.benchmarks.measuring.rounds import bootstrap
from experiments.benchmarks.measuring.timed_loop import BATCH_SIZE, digits_task

STEPS_PER_EPOCH = 20
FROZEN_BY_EPOCH = (0, 4, 4, 8, 8)
RUNS: dict[str, dict[str, Any]] = {
    "elastic": {},
    "K = 1": {"pipeline_length": 1, "micro_batches": 1},
    "K = 2, M = 2": {"pipeline_length": 2, "micro_batches": 2},
    "K = 2, M = 4": {"pipeline_length": 2, "micro_batches": 4},
}
BARS = Bars(most={"elastic_over_best_fixed": 1.10, "slower_after_freezing": 0})


@contextmanager
def noise(seed: int, *, wanted: bool) -> Iterator[None]:
    """Have a job beside this process take a core and give it back."""
    if not wanted:
        yield
        return
    job = subprocess.Popen([sys.executable, restless.__file__, str(seed)])
    try:
        yield
    finally:
        job.kill()
        job.wait()


def train(seed: int, settings: dict[str, Any]) -> list[float]:
    """Train beside the noise; return the seconds of every step but the first, transitions in."""
    task, seconds = digits_task(STEPS_PER_EPOCH * BATCH_SIZE), []
    with make_trainer(task, FROZEN_BY_EPOCH, seed=seed, **settings) as trainer:
        with noise(2 * seed, wanted=trainer.is_main_process):
            trainer.step()  # Measures and plans.
        dist.barrier()
        with noise(2 * seed + 1, wanted=trainer.is_main_process):
            while not trainer.is_over:
                start = time.perf_counter()
                trainer.step()
                seconds.append(time.perf_counter() - start)
    return seconds


def train_all(seed: int) -> dict[str, list[float]]:
    """Train in every way, each repeat in another order; return every step's seconds."""
    names = list(np.random.default_rng(seed).permutation(list(RUNS)))
    return {name: train(seed, RUNS[name]) for name in names}


def by_depth(seconds: list[float]) -> dict[int, float]:
    """Return a step's mean seconds at every number of frozen layers, but the run's first."""
    found: dict[int, list[float]] = {}
    for number, one in enumerate(seconds, start=1):
        found.setdefault(FROZEN_BY_EPOCH[number // STEPS_PER_EPOCH], []).append(one)
    return {depth: statistics.mean(some) for depth, some in found.items()}


def measure(num_repeats: int) -> dict[str, Any]:
    """Run all, say a line for each repeat, and return what the JSON line holds."""
    totals: dict[str, list[float]] = {name: [] for name in RUNS}
    depths: list[dict[int, float]] = []
    for seed in range(num_repeats):
        found = found_by(train_all, (seed,))
        for name in RUNS:
            totals[name].append(sum(found[name]))
        depths.append(by_depth(found["elastic"]))
        took = ", ".join(f"{name} {totals[name][-1]:.1f} s" for name in RUNS)
        steps = ", ".join(f"{1e3 * s:.0f} ms at {depth}" for depth, s in depths[-1].items())
        print(f"seed {seed}: {took}; elastic steps {steps}", flush=True)
    ratios = [
        elastic / min(fixed)
        for elastic, *fixed in zip(*(totals[name] for name in RUNS), strict=True)
    ]
    typical = [statistics.median(one[depth] for one in depths) for depth in depths[0]]
    ratio = bootstrap(np.array(ratios))
    return {
        "elastic_over_best_fixed": ratio.median,
        "slower_after_freezing": sum(after > before for before, after in pairwise(typical)),
        "interval": [ratio.low, ratio.high],
        "repeats": num_repeats,
        "median_s": {name: statistics.median(some) for name, some in totals.items()},
        "step_s_by_depth": dict(zip(depths[0], typical, strict=True)),
    }


def main() -> int:
    """Measure; fail where elasticity costs more than it may."""
    parser = argparse.ArgumentParser(description="Train beside jobs that come and go.")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    return conclude(measure(options.repeats), BARS)


if __name__ == "__main__":
    sys.exit(main())

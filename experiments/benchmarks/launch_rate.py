"""Measure the launch rate of small operations: threads of one process against processes.

Why it matters: the published system drives a whole pipeline, several devices, from one process.
Python's global lock then bounds the launch rate of all its devices together; one process per
device does not share it. Run it as `python -m experiments.benchmarks.launch_rate`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from multiprocessing.pool import ThreadPool

import torch

from experiments.benchmarks.measuring.bars import Bars, conclude
from experiments.benchmarks.measuring.rounds import num_cores

SECONDS = 0.5
REPEATS = 7


def count_operations(seconds: float) -> int:
    """Launch additions of 16 values, too small to compute anything, until time is up."""
    torch.set_num_threads(1)
    a, b = torch.ones(16), torch.ones(16)
    deadline, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < deadline:
        for _ in range(100):
            torch.add(a, b)
        done += 100
    return done


def main() -> int:
    """Print the medians of interleaved repeats and, last, one JSON line."""
    num = max(2, min(num_cores(), 4))
    with multiprocessing.get_context("spawn").Pool(num) as processes, ThreadPool(num) as threads:
        processes.map(count_operations, [0.0] * num, chunksize=1)  # The first call imports torch.
        rates: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            for name, pool, workers in (
                ("1 thread", threads, 1),
                (f"{num} threads", threads, num),
                (f"{num} processes", processes, num),
            ):
                done = pool.map(count_operations, [SECONDS] * workers, chunksize=1)
                rates.setdefault(name, []).append(sum(done) / SECONDS)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"  {name:12} {medians[name]:10,.0f} operations/s   ({spread})")
    return conclude({"operations_per_s": medians}, Bars())


if __name__ == "__main__":
    sys.exit(main())

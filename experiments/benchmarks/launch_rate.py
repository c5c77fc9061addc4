"""Measure the launch rate of small operations: threads of one process against processes.

Why it matters: the published system drives a whole pipeline, several devices, from one process.
Python's global lock then bounds the launch rate of all its devices together; one process per
device does not share it. Run it as `python -m experiments.benchmarks.launch_rate`.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.pool
import statistics
import threading
import time
from collections.abc import Callable

import torch

from experiments.benchmarks.measuring.rounds import num_cores

SECONDS = 0.5
REPEATS = 7


def count_operations(seconds: float, counts: list[int], index: int) -> None:
    """Launch additions of 16 values, too small to compute anything, until time is up."""
    a, b = torch.ones(16), torch.ones(16)
    deadline, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < deadline:
        for _ in range(100):
            torch.add(a, b)
        done += 100
    counts[index] = done


def in_threads(num: int) -> float:
    """Return operations a second of so many threads of this process."""
    counts = [0] * num
    threads = [
        threading.Thread(target=count_operations, args=(SECONDS, counts, i)) for i in range(num)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / SECONDS


def in_processes(pool: multiprocessing.pool.Pool) -> Callable[[int], float]:
    """Return a function that gives the operations a second of so many processes of a pool."""

    def measure(num: int) -> float:
        return sum(pool.map(count_alone, [SECONDS] * num, chunksize=1)) / SECONDS

    return measure


def count_alone(seconds: float) -> int:
    """Count in a process of its own."""
    torch.set_num_threads(1)
    counts = [0]
    count_operations(seconds, counts, 0)
    return counts[0]


def main() -> None:
    """Print the medians of interleaved repeats and, last, one JSON line."""
    torch.set_num_threads(1)
    num = max(2, min(num_cores(), 4))
    with multiprocessing.get_context("spawn").Pool(num) as pool:
        processes = in_processes(pool)
        processes(num)  # The first call imports torch.
        rates: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            for name, rate in (
                ("1 thread", in_threads(1)),
                (f"{num} threads", in_threads(num)),
                (f"{num} processes", processes(num)),
            ):
                rates.setdefault(name, []).append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"  {name:12} {medians[name]:10,.0f} operations/s   ({spread})")
    print(
        json.dumps(
            {
                "operations_per_s": medians,
                "cores": num_cores(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

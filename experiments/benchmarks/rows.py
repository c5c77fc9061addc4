"""Time reading cached rows of host memory against copying as many bytes.

A read copies rows from all over the store, and sums what it copied. In turn, by rounds:

    memcpy      as many bytes, side by side, by one thread of torch
    1, 2, 4     the read, by so many threads; beside a GPU into pinned memory
    python      a loop that computes in the interpreter
    beside      the same while a thread reads: over 1 is what it waits for the lock, or the core

Run it as `python -m experiments.benchmarks.rows`.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import torch

from autocache import RowField, RowLayout, RowPool, RowStore
from experiments.benchmarks.measuring.rounds import Seconds, bootstrap, interleave

NUM_THREADS = (1, 2, 4)


@dataclass(frozen=True)
class Rows:
    """Name the rows of a step: how many of how many, and what each holds."""

    name: str
    num: int
    num_stored: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num * math.prod(self.shape) * self.dtype.itemsize


CASES = (
    Rows("64 x 197 x 768 float32", 64, 512, (197, 768), torch.float32),
    Rows("4 x 2048 x 2048 bfloat16", 4, 32, (2048, 2048), torch.bfloat16),
    Rows("32 x 128 x 384 float32", 32, 512, (128, 384), torch.float32),
)


def compute() -> int:
    """Compute for some 10 ms in the interpreter, which no operation leaves."""
    return sum(number & 3 for number in range(200_000))


def timed(rows: Rows, *, num_rounds: int) -> Seconds:
    """Return the seconds of each action, one entry a round."""
    layout = RowLayout((RowField("hidden", rows.shape, rows.dtype),))
    generator = torch.Generator().manual_seed(0)
    with ExitStack() as closing_all:
        store = closing_all.enter_context(RowStore.in_memory(layout, rows.num_stored))
        for row in range(rows.num_stored):
            value = torch.rand(1, *rows.shape, generator=generator).to(rows.dtype)
            store.write(torch.tensor([row]), 1, {"hidden": value})
        pinned = torch.cuda.is_available()
        buffers = [store.buffers(rows.num, pinned=pinned) for _ in range(2)]

        def copy() -> None:
            buffers[0]["hidden"].copy_(buffers[1]["hidden"])

        def reading(pool: RowPool) -> Callable[[], None]:
            def read() -> None:
                ids = torch.randperm(rows.num_stored, generator=generator)[: rows.num]
                assert store.read(ids, (1,), into=buffers[0], pool=pool).depth.all()

            return read

        actions: dict[str, Callable[[], object]] = {"memcpy": copy, "python": compute}
        for num in NUM_THREADS:
            pool = closing_all.enter_context(closing(RowPool(num)))
            actions[str(num)] = reading(pool)
        actions["beside"] = lambda: beside(actions["1"])
        return interleave(actions, num_rounds=num_rounds)


def beside(read: Callable[[], object]) -> None:
    """Compute while a thread reads again and again."""
    has_ended = threading.Event()

    def read_on() -> None:
        while not has_ended.is_set():
            read()

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        compute()
    finally:
        has_ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for rows in CASES:
        seconds = timed(rows, num_rounds=num_rounds)
        print(f"\n{rows.name}, {rows.num_bytes / 1e6:.0f} MB")
        for name in ("memcpy", *map(str, NUM_THREADS)):
            typical, ratio = np.median(seconds[name]), bootstrap(seconds[name] / seconds["memcpy"])
            print(
                f"{name:>8} {1e3 * typical:7.2f} ms, at least {1e3 * min(seconds[name]):6.2f}  "
                f"{rows.num_bytes / typical / 1e9:6.2f} GB/s  "
                f"of memcpy {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
            )
        ratio = bootstrap(seconds["beside"] / seconds["python"])
        print(f"a loop beside a read {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")


if __name__ == "__main__":
    main()

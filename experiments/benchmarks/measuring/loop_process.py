"""Run the plain loop in a process of its own, as its user would.

A Trainer sets up the allocator of the process that it is in (`pipetransformer.processes`); beside
it, a plain loop would keep freed memory, too, without having asked for it.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from experiments.benchmarks.measuring.rounds import seconds_of
from experiments.benchmarks.measuring.timed_loop import TimedLoop
from experiments.gpu_check.workloads import LoopCase

_PATIENCE_S = 300.0
"""For a step, or for what precedes the first one."""


class LoopProcess:
    """Lead a `TimedLoop` that another process holds; what it is asked for, it times itself.

    Args:
        task: what the loop trains; it travels to the process.
        num_threads: that it computes on.
        settings: further arguments of the loop.
    Raises:
        TimeoutError: it has not answered.
        RuntimeError: it has failed; what it printed says why.
    """

    def __init__(self, task: LoopCase, *, num_threads: int, **settings: Any) -> None:
        # Fresh: a fork would take the allocator along.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            1, context, initializer=_begin, initargs=(task, num_threads, settings)
        )
        self.freeze(0)

    def freeze(self, num_frozen: int) -> None:
        """Freeze the bottom layers."""
        self._pool.submit(_freeze, num_frozen).result(_PATIENCE_S)

    def step(self) -> float:
        """Train on the next batch; return the seconds that it took."""
        return self._pool.submit(_step).result(_PATIENCE_S)

    def __enter__(self) -> LoopProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


_LOOPS: list[TimedLoop] = []
"""Of this process, which holds one."""


def _begin(task: LoopCase, num_threads: int, settings: dict[str, Any]) -> None:
    torch.set_num_threads(num_threads)
    _LOOPS.append(TimedLoop(task, **settings))


def _freeze(num_frozen: int) -> None:
    _LOOPS[0].freeze(num_frozen)


def _step() -> float:
    return seconds_of(_LOOPS[0].step)

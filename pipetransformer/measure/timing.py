"""Time short actions as they run within a training step: with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

_DISPLACING_BYTES = 32 << 20
"""Memory that, once touched, displaces the CPU caches' content."""


def displacer() -> Callable[[], object]:
    """Return a function that fills the CPU's caches with something else, as computing does.

    An action in Python takes up to five times longer then.
    """
    return partial(torch.zeros(_DISPLACING_BYTES // 4).add_, 1)


def typical_s(
    action: Callable[[], object], *, repeats: int, before: Callable[[], object] | None = None
) -> float:
    """Return the median of `repeats_s`."""
    return statistics.median(repeats_s(action, repeats=repeats, before=before))


def repeats_s(
    action: Callable[[], object], *, repeats: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Return the seconds of each repeat, after one to warm up; they include the device's work.

    Args:
        before: called before each repeat, untimed.
    """
    times = []
    for _ in range(repeats + 1):
        if before is not None:
            before()
        start = time.perf_counter()
        action()
        if torch.cuda.is_initialized():  # Else nothing runs on a GPU here.
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]

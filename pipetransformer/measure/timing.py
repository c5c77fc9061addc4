"""Time short actions, repeated or as they run within a training step: after much else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

_DISPLACING_BYTES = 32 << 20
"""Memory whose use displaces what the CPU's caches hold of an action's code and data."""


def displacer() -> Callable[[], object]:
    """Return what fills the CPU's caches with something else, as a step's computing does.

    An action of much Python takes up to five times longer then.
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
    """Return the seconds of each of an action's repeats, after one to warm up.

    Args:
        action: what to time; the device is waited for.
        repeats: how often.
        before: done before each of them, untimed.
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

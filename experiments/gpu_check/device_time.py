"""Time what a device computes: it is waited for around a block of steps, never within."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: str) -> None:
    """Wait until all that was launched is computed."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_on(device: str, action: Callable[[], Any]) -> float:
    """Time an action with all that it launches, and nothing that was launched before."""
    synchronize(device)
    start = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - start

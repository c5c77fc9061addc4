"""Say how much of a device's memory is free, and which of several limits holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def tightest(limits: Iterable[int | None]) -> int | None:
    """Return the smallest of the limits that there are; None where all are None, for no limit."""
    return min((limit for limit in limits if limit is not None), default=None)

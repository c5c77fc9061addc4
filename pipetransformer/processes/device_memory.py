"""Say how much of a device's memory is free, and which of several limits holds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipetransformer.processes.world import slots_of_a_node


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a GPU; None on other devices.

    Slots that share a GPU have equal parts of what is free there.
    """
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] // _num_slots_on(device)
    return free + cached


def _num_slots_on(device: torch.device) -> int:
    """Count the slots of this node that have a GPU; they take the GPUs in turn."""
    slots = range(device.index or 0, slots_of_a_node(), torch.cuda.device_count())
    return max(1, len(slots))


def tightest(limits: Iterable[int | None]) -> int | None:
    """Return the smallest of the limits that there are; None where all are None, for no limit."""
    return min((limit for limit in limits if limit is not None), default=None)

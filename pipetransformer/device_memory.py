"""Say how much of a device's memory is free."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a GPU; None on other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached

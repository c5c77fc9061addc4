"""Copy this rank's shards into host memory, one tensor behind the other.

The copy is all that training waits for. Fresh memory is several times slower to fill than memory
that was used before, so it is reserved ahead and kept from save to save.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopipe.engine import Milestone

Shards = Mapping[str, Mapping[str, Tensor]]

_ALIGNMENT_BYTES = 64


class Snapshot:
    """Keep the host memory that shards are copied into; pinned, a GPU copies faster into it."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: Milestone | None = None

    def reserve(self, num_bytes: int) -> None:
        """Make sure that so much memory is there; if it was not, what was taken is lost."""
        if num_bytes > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # Never two of them at once.
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory.zero_()  # A page becomes memory when it is first written.

    def take(self, shards: Shards) -> Shards:
        """Return copies of the shards, contiguous and apart; they overwrite an earlier call's.

        Copies from a GPU are queued behind the work of its current stream: call `finish` before
        the data is read, and not before training goes on.
        """
        self.reserve(num_bytes_of(shards))
        taken: dict[str, dict[str, Tensor]] = {}
        start = 0
        for name, tensors in shards.items():
            taken[name] = {}
            for key, tensor in tensors.items():
                place = self._memory[start : start + tensor.nbytes]
                copy = place.view(tensor.dtype).view(tensor.shape)
                taken[name][key] = copy.copy_(tensor.detach(), non_blocking=True)
                start += _aligned_bytes(tensor)
        if self._pinned:
            self._copied = Milestone()
        return taken

    def finish(self) -> None:
        """Wait until a GPU's copies have arrived; in any thread."""
        if self._copied is not None:
            self._copied.wait()


def num_bytes_of(shards: Shards) -> int:
    """Return the memory that a snapshot of the shards takes."""
    return sum(_aligned_bytes(one) for tensors in shards.values() for one in tensors.values())


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

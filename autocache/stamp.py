"""Identify what activations have passed through: a chained hash of the frozen layers.

The stamp of depth d covers everything that decides the numbers after the first d layers: their
parameters and buffers, dtypes, and the mode they run in. A layer that was thawed, trained and
frozen again gives another stamp, so activations from before the thaw are never taken for current.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def chain_hash(previous: int, tensors: Iterable[tuple[str, Tensor]], *, mode: str) -> int:
    """Hash one layer's tensors onto the hash of all layers before it.

    Args:
        previous: the chain so far, 0 <= previous < 2**64; 0 starts a chain.
        tensors: (name, tensor) of every parameter and buffer, in a fixed order; any dtype, any
            device (each is copied to the CPU once).
        mode: how the layer is run, where that changes its numbers, such as "eval, autocast off".
    Returns:
        the 64-bit hash, never 0: a store's row with stamp 0 is an empty row.
    """
    digest = hashlib.blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(repr(mode).encode())
    for name, tensor in tensors:
        # Name, dtype and shape fix how many bytes follow, so no two inputs read the same.
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        # numpy has no bfloat16, hence the bytes.
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") or 1


class PrefixStamps:
    """Hold the stamps of the frozen prefix: `stamps[d]` for d = 1..f, f = `len(stamps)`."""

    def __init__(self, mode: str) -> None:
        """Start with nothing frozen.

        Args:
            mode: see `chain_hash`; the same for every layer of the prefix.
        """
        self._mode = mode
        self._stamps: list[int] = []

    def __len__(self) -> int:
        return len(self._stamps)

    def __getitem__(self, depth: int) -> int:
        """Return the stamp of activations that have passed through the first `depth` layers."""
        return self.up_to(depth)[-1]

    def up_to(self, depth: int) -> tuple[int, ...]:
        """Return the stamps of depths 1..depth, shallowest first.

        Raises:
            ValueError: `depth` is not in 1..len(self).
        """
        if not 1 <= depth <= len(self):
            raise ValueError(
                f"depth {depth} has no stamp: {len(self)} layers are frozen; "
                f"choose a depth in 1..{len(self)}, or extend the stamps first"
            )
        return tuple(self._stamps[:depth])

    def extend(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stamp the next layer, just frozen, by its parameters and buffers."""
        previous = self._stamps[-1] if self._stamps else 0
        self._stamps.append(chain_hash(previous, tensors, mode=self._mode))

    def truncate(self, depth: int) -> None:
        """Forget the stamps of layers thawed, keeping depths 1..depth.

        Raises:
            ValueError: `depth` is negative or more than is stamped.
        """
        if not 0 <= depth <= len(self):
            raise ValueError(f"cannot keep {depth} of {len(self)} stamps; choose 0..{len(self)}")
        del self._stamps[depth:]

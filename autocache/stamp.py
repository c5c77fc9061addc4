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

"""Identify what activations have passed through: a chained hash of the frozen layers.

The stamp of depth d covers all that decides the numbers after d layers: parameters and buffers,
dtypes, and the mode they run in. A layer that was thawed, trained and frozen again gives another
stamp, so activations from before the thaw are never used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

_WORD_BYTES, _BLOCK_WORDS, _BLOCKS_OF_A_GPU = 4, 1 << 16, 256
_BLOCK_FACTOR = 0x1E3779B97F4A7C15
_SMALL_BYTES = 1 << 16


def chain_hash(previous: int, tensors: Iterable[tuple[str, Tensor]], *, mode: str) -> int:
    """Hash one layer's tensors onto the hash of all layers before it.

    Args:
        previous: the chain so far, 0 <= previous < 2**64; 0 starts a chain.
        tensors: (name, tensor) of every parameter and buffer, in a fixed order; any device.
        mode: how the layer is run, if that changes its numbers, such as "eval, autocast off".
    Returns:
        the 64-bit hash, never 0: a store's row with stamp 0 is an empty row.
    """
    digest = hashlib.blake2b(previous.to_bytes(8, "little"), digest_size=8)
    digest.update(repr(mode).encode())
    for name, tensor in tensors:
        # Name, dtype and shape fix how many bytes follow, so no two inputs read the same.
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        # As bytes, since numpy has no bfloat16.
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") or 1


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Hash tensors to notice changes, in a part of the time of a stamp.

    The hash sums 32-bit words, each times a random 64-bit factor of its place. An accidental
    change goes unseen with a chance of at most 2**-33. Rows are trusted by stamps, not by this.

    Args:
        tensors: in a fixed order; any dtype and device. The host waits once for all of one device.
    """
    shapes, small, sums = [], [], list[Tensor]()
    for tensor in tensors:
        shapes.append((tuple(tensor.shape), tensor.dtype))
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if len(values) <= _SMALL_BYTES:
            small.append(values)
        else:
            sums.append(_sum_of_words(values))
    if len({part.device for part in (*small, *sums)}) > 1:
        small, sums = [part.cpu() for part in small], [part.cpu() for part in sums]
    if small:  # Together, as each takes less time than to begin with it.
        sums.append(_sum_of_words(torch.cat(small)))
    numbers = torch.stack(sums).tolist() if sums else []
    digest = hashlib.blake2b(repr((shapes, numbers)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _sum_of_words(values: Tensor) -> Tensor:
    """Return a 0-dim int64 of (N,) bytes on their device, the same on every device."""
    words = values[: len(values) // _WORD_BYTES * _WORD_BYTES].view(torch.int32)
    rest = values[len(words) * _WORD_BYTES :]  # At most 3, in a word of their own.
    total = values.new_zeros((), dtype=torch.int64)
    if len(rest):
        total = nn.functional.pad(rest, (0, _WORD_BYTES - len(rest))).view(torch.int32).sum()
    if values.device.type == "cpu":
        return total + _sum_in_blocks(words.numpy())
    factors = _factors(values.device)
    # Many blocks at once, to launch few kernels.
    for number, part in enumerate(words.split(_BLOCKS_OF_A_GPU * _BLOCK_WORDS)):
        # To pad by nothing would copy.
        gap = -len(part) % _BLOCK_WORDS
        whole = nn.functional.pad(part, (0, gap)) if gap else part
        sums = (whole.view(len(whole) // _BLOCK_WORDS, _BLOCK_WORDS) * factors).sum(dim=1)
        total = total + (sums * _block_factors(number, len(sums), values.device)).sum()
    return total


@lru_cache(maxsize=64)
def _block_factors(number: int, num: int, device: torch.device) -> Tensor:
    """Return (num,) int64: an odd factor for each block of a part, as blocks may change places."""
    first = number * _BLOCKS_OF_A_GPU
    blocks = torch.arange(first, first + num, device=device)
    return (2 * blocks + 1) * _BLOCK_FACTOR  # Integers wrap around.


def _sum_in_blocks(words: np.ndarray) -> int:
    """Return the same of (N,) int32 words, less the last bytes."""
    # Blocks that are widened within a core's cache; by numpy, as torch wakes threads for each.
    factors, total = _factors(torch.device("cpu")).numpy(), 0
    for number, start in enumerate(range(0, len(words), _BLOCK_WORDS)):
        part = words[start : start + _BLOCK_WORDS].astype(np.int64)
        total += int(np.dot(part, factors[: len(part)])) * (2 * number + 1) * _BLOCK_FACTOR
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> Tensor:
    """Return random int64, one for each word of a block."""
    generator = torch.Generator().manual_seed(0)
    shape = (_BLOCK_WORDS,)
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator).to(device)

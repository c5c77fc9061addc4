"""Copy rows of a field between a store's file and memory, and check their words on the way.

A row's check is the sum of its words, each times an odd factor of its place, modulo 2**64: it
tells any one changed word, and words that changed their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from autocache.layout import WORD_BYTES, RowField, round_up

_BLOCK_BYTES = 1 << 21
"""What is copied before it is summed: little enough to be in the CPU's cache still."""


def num_words(field: RowField) -> int:
    return round_up(field.num_bytes, WORD_BYTES) // WORD_BYTES


def own_words(field: RowField, lengths: np.ndarray) -> np.ndarray | None:
    """Return the (B,) words that rows of these lengths have; None where all have all."""
    if not field.varies:
        return None
    most = max(field.shape[0], 1)
    # A damaged length is any number; so much is read at most, and found out by the check.
    own = np.minimum(lengths, np.uint64(most)).astype(np.int64)
    return -(-own * (field.num_bytes // most) // WORD_BYTES)


def as_words(field: RowField, values: Tensor) -> Tensor:
    """Return (B, *shape) values as (B, words) int64, filled up with zeros."""
    flat = values.contiguous().view(len(values), math.prod(field.shape)).view(torch.uint8)
    gap_bytes = num_words(field) * WORD_BYTES - field.num_bytes
    return (nn.functional.pad(flat, (0, gap_bytes)) if gap_bytes else flat).view(torch.int64)


def factors_of(num: int) -> np.ndarray:
    """Return (num,) odd uint64, one for each word of a row."""
    return np.random.default_rng(0).integers(1 << 63, size=num, dtype=np.uint64) * 2 + 1


def copy_out(
    source: np.ndarray,
    words: Tensor,
    out: Tensor,
    own: np.ndarray | None,
    factors: np.ndarray,
    *,
    in_background: bool = False,
) -> np.ndarray:
    """Copy rows of a field out of the file.

    Args:
        source: (B,) rows' numbers in the file.
        words: the file's, (rows, words) int64.
        out: (B, words) int64.
        own: (B,) words that the rows have; None where all have all. The others become 0.
        factors: (words,) uint64, of the check.
        in_background: whether to do so on the calling thread alone.
    Returns:
        (B,) uint64, their check.
    """
    checks = np.empty(len(out), np.uint64)
    table, rows = words.numpy(), out.numpy()
    copied = rows.view(np.uint64)
    if own is not None:
        for row, slot, num in zip(rows, source.tolist(), own.tolist(), strict=True):
            row[:num] = table[slot, :num]
            row[num:] = 0
        return np.matmul(copied, factors, out=checks)
    index = torch.from_numpy(source)
    for part in _blocks(out):
        if in_background:
            # Each lets go of the interpreter, and starts no threads of its own. `np.take` would
            # copy the whole file first, as rows of one field are not side by side there.
            for row, slot in zip(rows[part], source[part].tolist(), strict=True):
                row[:] = table[slot]
        else:
            torch.index_select(words, 0, index[part], out=out[part])
        np.matmul(copied[part], factors, out=checks[part])
    return checks


def copy_in(
    ids: np.ndarray, values: Tensor, words: Tensor, own: np.ndarray | None, factors: np.ndarray
) -> np.ndarray:
    """Copy rows of a field into the file; as `copy_out`, the other way."""
    given = values.numpy().view(np.uint64)
    if own is None:
        words[torch.from_numpy(ids)] = values
        return np.matmul(given, factors)
    table, checks = words.numpy().view(np.uint64), np.empty(len(ids), np.uint64)
    for row, (slot, num) in enumerate(zip(ids.tolist(), own.tolist(), strict=True)):
        table[slot, :num] = given[row, :num]
        checks[row] = np.dot(given[row, :num], factors[:num])
    return checks


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Cut rows of a field into blocks that the CPU's cache holds."""
    step = max(1, _BLOCK_BYTES // max(1, rows.shape[1] * WORD_BYTES))
    return (slice(start, start + step) for start in range(0, len(rows), step))

"""Copy rows' words into a file and out of it, and sum what was copied.

A row's sum is of its words, each times an odd factor of its place, modulo 2**64. It changes with
any one word, and where words change places.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_PIECE_WORDS = 1 << 15
"""Copied before they are summed: few enough to be in the CPU's cache still."""
_SHORT_WORDS = 1 << 10
"""Of rows that are copied, or summed, faster together than by a call for each."""
_ALL_BITS = (1 << 64) - 1


def factors_of(num_words: int) -> np.ndarray:
    """Return the (words,) uint64 factors of a row's words, the same in all processes."""
    factors: np.ndarray = (
        np.random.default_rng(0).integers(1 << 63, size=num_words, dtype=np.uint64) * 2 + 1
    )
    return factors


def copy_out(
    source: np.ndarray,
    words: Tensor,
    out: Tensor,
    factors: np.ndarray,
    *,
    found: np.ndarray,
    own: np.ndarray | None,
) -> np.ndarray:
    """Copy the rows of a field that were found out of the file, and return their checks.

    Others stay as they are in `out`. A piece is summed while it is in the CPU's cache. All that
    takes long releases the interpreter's lock, and starts no threads of torch; `np.matmul` would
    hold the lock, and `np.take` copy the whole file first.

    Args:
        source: (B,) row numbers in the file.
        words, out: the file's (rows, words), and (B, words), int64.
        factors: (words,) uint64.
        found: (B,) bool.
        own: (B,) words that each row has, the others become 0; None where all have all.
    Returns:
        (B,) uint64, 0 for rows that were not found.
    """
    table, rows = words.numpy().view(np.uint64), out.numpy().view(np.uint64)
    # The place and length of a row that was not found may be any, and lead anywhere.
    (places,) = found.nonzero()
    slots, num_words, checks = source[places], rows.shape[1], np.zeros(len(out), np.uint64)
    is_short = num_words <= _SHORT_WORDS
    if own is None and len(places) == len(out) and num_words <= _PIECE_WORDS:
        step = _PIECE_WORDS // max(1, num_words)
        for part in (slice(start, start + step) for start in range(0, len(out), step)):
            _copy_together(slots[part], table, rows[part], is_short=is_short)
            checks[part] = np.einsum("nw,w->n", rows[part], factors)
        return checks
    if own is None and is_short:
        rows[places] = table[slots]
        return np.einsum("nw,w->n", rows, factors)
    nums = np.full(len(places), num_words) if own is None else own[places]
    for place, slot, num in zip(places.tolist(), slots.tolist(), nums.tolist(), strict=True):
        row, from_file, check = rows[place], table[slot], 0
        row[num:] = 0
        for start in range(0, num, _PIECE_WORDS):
            piece = row[start : min(num, start + _PIECE_WORDS)]
            piece[:] = from_file[start : start + len(piece)]
            if not is_short:
                check += int(np.dot(piece, factors[start : start + len(piece)]))
        checks[place] = check & _ALL_BITS
    return np.einsum("nw,w->n", rows, factors) if is_short else checks


def _copy_together(
    slots: np.ndarray, table: np.ndarray, rows: np.ndarray, *, is_short: bool
) -> None:
    if is_short:
        rows[:] = table[slots]
        return
    for row, slot in zip(rows, slots.tolist(), strict=True):
        row[:] = table[slot]


def copy_in(
    ids: np.ndarray, values: Tensor, words: Tensor, own: np.ndarray | None, factors: np.ndarray
) -> np.ndarray:
    """Copy rows of a field into the file, and return their checks; see `copy_out`."""
    given = values.numpy().view(np.uint64)
    if own is None:
        if words.stride(0) < words.shape[1]:
            words.numpy()[ids] = values.numpy()  # torch writes to no rows that overlap.
        else:
            words[torch.from_numpy(ids)] = values
        return np.einsum("nw,w->n", given, factors)
    table, checks = words.numpy().view(np.uint64), np.empty(len(ids), np.uint64)
    for row, (slot, num) in enumerate(zip(ids.tolist(), own.tolist(), strict=True)):
        table[slot, :num] = given[row, :num]
        checks[row] = np.dot(given[row, :num], factors[:num])
    return checks


def check_values(
    sums: np.ndarray, ids: np.ndarray, stamps: np.ndarray | np.uint64, lengths: np.ndarray
) -> np.ndarray:
    """Return the check values of rows by their words' sums, places, stamps and lengths."""
    # Odd factors, so that equal differences in two of the terms do not cancel.
    places = ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    return (sums + places + lengths * np.uint64(0x9E3779B97F4A7C15)) ^ stamps

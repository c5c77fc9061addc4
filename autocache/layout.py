"""Describe a row of the cache: its tensors, and where in the row each of them starts.

row:   | field | pad | field | pad |        each field starts at a multiple of 64 bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGN_BYTES = 64


def round_up(num_bytes: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class RowField:
    """Describe one tensor of a row.

    Args:
        name: unique in the row.
        shape: one sample's, without the batch dimension; the longest where it varies.
        dtype: as it is stored.
        varies: whether a row may hold fewer entries along the first dimension; the others are not
            stored, and read as zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    varies: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one sample, of the longest where they vary."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Describe a row: its fields in order.

    Raises:
        ValueError: there is no field, or two fields share a name.
    """

    fields: tuple[RowField, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"a row layout has fields {names}; give at least one, each name once")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return where each field starts in the row, and last where the row ends, in bytes."""
        ends = [0]
        for field in self.fields:
            ends.append(ends[-1] + round_up(field.num_bytes, ALIGN_BYTES))
        return tuple(ends)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, padding included."""
        return self.offsets[-1]

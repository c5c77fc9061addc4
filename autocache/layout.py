"""Lay a store's rows out in a file, and map it into memory.

file:  | fingerprint, condemned, writer | stamp, check, length | ... | row 0 | row 1 | ...
row:   | field | pad | field | pad |        each field starts at a multiple of 64 bytes

Every byte is reserved when the file is made. Else the first write to a full file system would kill
the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

ALIGN_BYTES = 64
WORD_BYTES = 8
TAG_WORDS = 3
"""A row's stamp, its check value, and the length of its varying fields."""

_PAGE_BYTES = 4096


def round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class RowField:
    """Describe one tensor of a row.

    Args:
        shape: one sample's, without the batch dimension; the longest where it varies.
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

    @property
    def num_words(self) -> int:
        return round_up(self.num_bytes, WORD_BYTES) // WORD_BYTES

    def own_words(self, lengths: np.ndarray) -> np.ndarray | None:
        """Return the (B,) words that rows of these lengths have; None where all have all."""
        if not self.varies:
            return None
        most = max(self.shape[0], 1)
        # A damaged length may be any number. It must not lead behind the row; the check finds it.
        entries = np.minimum(lengths, np.uint64(most)).astype(np.int64)
        return -(-entries * (self.num_bytes // most) // WORD_BYTES)

    def as_words(self, values: Tensor) -> Tensor:
        """Return (B, *shape) values as (B, words) int64, filled up with zeros."""
        flat = values.contiguous().view(len(values), math.prod(self.shape)).view(torch.uint8)
        gap_bytes = self.num_words * WORD_BYTES - self.num_bytes
        return (nn.functional.pad(flat, (0, gap_bytes)) if gap_bytes else flat).view(torch.int64)


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
        sizes = (round_up(field.num_bytes, ALIGN_BYTES) for field in self.fields)
        return tuple(accumulate(sizes, initial=0))

    @property
    def row_bytes(self) -> int:
        return self.offsets[-1]


@dataclass(frozen=True)
class FileShape:
    """State what a file holds."""

    layout: RowLayout
    num_rows: int

    @property
    def rows_start(self) -> int:
        """Return where the first row begins, in bytes."""
        return round_up(ALIGN_BYTES + TAG_WORDS * WORD_BYTES * self.num_rows, _PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.rows_start + self.num_rows * self.layout.row_bytes

    @property
    def fingerprint(self) -> np.uint64:
        text = repr((self.layout, self.num_rows))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def reserve(self, descriptor: int, path: Path) -> mmap.mmap:
        """Map every byte of a new file, with all rows empty; see `RowStore.create`."""
        if self.num_rows < 1:
            raise ValueError(f"a row store has {self.num_rows} rows; give at least 1, or no store")
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            mapping = mmap.mmap(descriptor, self.num_bytes)
            np.frombuffer(mapping, np.uint64, count=1)[0] = self.fingerprint
            return mapping
        except OSError as error:
            free = os.fstatvfs(descriptor)
            raise OSError(
                error.errno,
                f"the cache needs {self.num_bytes} bytes at {path} and could not get them "
                f"({error.strerror}; {free.f_bavail * free.f_frsize} bytes are free); "
                "cache fewer rows, or put the file on a larger file system",
            ) from error

    def open(self, path: Path) -> mmap.mmap:
        """Map a file that another process of this node has made; see `RowStore.open`."""
        with path.open("rb+") as file:
            size = os.fstat(file.fileno()).st_size
            if size == self.num_bytes:
                mapping = mmap.mmap(file.fileno(), size)
                if np.frombuffer(mapping, np.uint64, count=1)[0] == self.fingerprint:
                    return mapping
        raise ValueError(
            f"cache file {path} of {size} bytes has another layout than the {self.num_rows} rows "
            f"of {self.layout.fields} asked for ({self.num_bytes} bytes); open it as created"
        )

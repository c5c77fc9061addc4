"""Lay a store's rows out in a file, and map it into memory.

rows of one length   | header | stamp, check, length | ... | row 0 | row 1 | ...
rows that vary       | header | stamp, check, length, room | ... | a row | a row | ... | free ...
a row                | field | pad | field | pad |     each field starts at a multiple of 64 bytes

Rows of one length have a fixed place, and every byte is reserved when the file is made. Rows that
vary take a room of their own length when they are first written, see `rooms`; fields that vary are
a row's last. Bytes are reserved before they are touched: else a write to a full file system would
kill the process with SIGBUS.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ALIGN_BYTES = 64
WORD_BYTES = 8
HEADER_WORDS = ALIGN_BYTES // WORD_BYTES
"""The layout's fingerprint, whether the store is condemned, the run that writes, the units that
rows have taken, the file's size, and which run was told that there is no more room."""
CONDEMNED, WRITER, TAKEN, SIZE, TOLD = range(1, 6)

BLOCK_BYTES = 512
"""Of `st_blocks`, whatever the file system."""
_PAGE_BYTES = 4096
_MOST_PER_ROW = 3
"""Longest rows that a file has space for, for each that it holds: what is left of a process's
extent may be too short for the next row, and a row that grew leaves its room."""


def round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def units_of(words: np.ndarray) -> np.ndarray:
    """Return how many units of 64 bytes a number of words takes."""
    units: np.ndarray = (words + 7) >> 3
    return units


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

    def to_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` makes the field."""
        return {**asdict(self), "dtype": str(self.dtype)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RowField:
        """Make a field; a KeyError, TypeError or AttributeError where values are damaged."""
        dtype = getattr(torch, values["dtype"].removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{values['dtype']} is no dtype")
        return cls(values["name"], tuple(values["shape"]), dtype, values["varies"])

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
        # Shifted, as these few numbers are divided with every read and write.
        words: np.ndarray = (entries * (self.num_bytes // most) + 7) >> 3
        return words

    def expected_bytes(self, mean_length: float | None) -> int:
        """Return what the field takes on average, by the mean of its rows' lengths."""
        if not self.varies or mean_length is None:
            return round_up(self.num_bytes, ALIGN_BYTES)
        entry_bytes = self.num_bytes / max(self.shape[0], 1)
        return round_up(math.ceil(mean_length * entry_bytes), ALIGN_BYTES)

    def as_words(self, values: Tensor) -> Tensor:
        """Return (B, *shape) values as (B, words) int64, filled up with zeros."""
        flat = values.contiguous().view(len(values), math.prod(self.shape)).view(torch.uint8)
        gap_bytes = self.num_words * WORD_BYTES - self.num_bytes
        return (nn.functional.pad(flat, (0, gap_bytes)) if gap_bytes else flat).view(torch.int64)


@dataclass(frozen=True)
class RowLayout:
    """Describe a row: its fields in order.

    Args:
        mean_length: of varying fields, as far as it is known; rows are the same with another.
    Raises:
        ValueError: there is no field, or two fields share a name.
    """

    fields: tuple[RowField, ...]
    mean_length: float | None = field(default=None, compare=False, repr=False)

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
        """Return the bytes of a row, of the longest where they vary."""
        return self.offsets[-1]

    @property
    def expected_bytes(self) -> int:
        """Return the bytes that a row takes in a file on average."""
        return sum(field.expected_bytes(self.mean_length) for field in self.fields)

    def check(self, rows: Mapping[str, Tensor], num: int) -> None:
        """Raise a ValueError for rows that do not match."""
        given = {name: (tuple(row.shape), row.dtype) for name, row in rows.items()}
        wanted = {field.name: ((num, *field.shape), field.dtype) for field in self.fields}
        if given != wanted:
            raise ValueError(
                f"rows {given} do not match the store's {wanted}; every sample needs the same "
                "shapes and dtypes, so pad each sample to a fixed length or use no store"
            )

    @property
    def varies(self) -> bool:
        return any(field.varies for field in self.fields)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of the fields that do not vary."""
        return sum(round_up(one.num_bytes, ALIGN_BYTES) for one in self.fields if not one.varies)


@dataclass(frozen=True)
class FileShape:
    """State what a file holds.

    Args:
        limit_bytes: the most that rows take where they vary.
    """

    layout: RowLayout
    num_rows: int
    limit_bytes: int | None = None

    @property
    def tag_words(self) -> int:
        """Return how many words say of a row what it is, and where it is if rows vary."""
        return 4 if self.layout.varies else 3

    @property
    def rows_start(self) -> int:
        """Return where the first row begins, in bytes."""
        return round_up(ALIGN_BYTES + self.tag_words * WORD_BYTES * self.num_rows, _PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the size of a file; rows that vary take a part of it."""
        rows_bytes = self.num_rows * self.layout.row_bytes
        if not self.layout.varies:
            return self.rows_start + rows_bytes
        most_bytes = _MOST_PER_ROW * rows_bytes
        if self.limit_bytes is not None:
            most_bytes = min(most_bytes, self.limit_bytes)
        return self._size_for(most_bytes)

    @property
    def expected_bytes(self) -> int:
        """Return what a file takes once all rows are written, by their mean length."""
        rows_bytes = self.num_rows * self.layout.expected_bytes
        if self.limit_bytes is not None and self.layout.varies:
            rows_bytes = min(rows_bytes, self.limit_bytes)
        return self.rows_start + rows_bytes

    @property
    def fingerprint(self) -> np.uint64:
        what = (self.layout, self.num_rows)
        text = repr(("packed", *what) if self.layout.varies else what)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def num_units(self, size: int) -> int:
        """Return how many units a file of this size has for rows that vary."""
        return (size - self.rows_start - self.layout.row_bytes) // ALIGN_BYTES

    def reserve(self, descriptor: int, path: Path) -> mmap.mmap:
        """Map a new file, with all rows empty; see `RowStore.create`.

        Every byte is reserved, but those of rows that vary.
        """
        if self.num_rows < 1:
            raise ValueError(f"a row store has {self.num_rows} rows; give at least 1, or no store")
        free_bytes = _room(descriptor)
        try:
            size = self._made(descriptor, free_bytes)
            return self.prepare(mmap.mmap(descriptor, size))
        except OSError as error:
            raise OSError(
                error.errno,
                f"the cache needs {self.expected_bytes} bytes at {path} and could not get them "
                f"({error.strerror}; {free_bytes} bytes are free); "
                "cache fewer rows, or put the file on a larger file system",
            ) from error

    def prepare(self, mapping: mmap.mmap) -> mmap.mmap:
        """Write the header of a new file, or of memory."""
        header = np.frombuffer(mapping, np.uint64, count=HEADER_WORDS)
        header[[0, SIZE]] = self.fingerprint, len(mapping) if self.layout.varies else 0
        return mapping

    def open(self, descriptor: int, path: Path) -> mmap.mmap:
        """Map a file that another process of this node has made; see `RowStore.open`."""
        size = os.fstat(descriptor).st_size
        if size == self.num_bytes or (self.layout.varies and self.num_units(size) >= 0):
            mapping = mmap.mmap(descriptor, size)
            header = np.frombuffer(mapping, np.uint64, count=HEADER_WORDS)
            # A file that was cut short lacks rows.
            is_whole = not self.layout.varies or header[SIZE] == size
            if header[0] == self.fingerprint and is_whole:
                return mapping
        raise ValueError(
            f"cache file {path} of {size} bytes has another layout than the {self.num_rows} rows "
            f"of {self.layout.fields} asked for ({self.num_bytes} bytes); open it as created"
        )

    def _made(self, descriptor: int, free_bytes: int) -> int:
        """Give a new file its size, reserve what is used at once, and return the size."""
        if not self.layout.varies:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            return self.num_bytes
        if self.expected_bytes > free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = min(self.num_bytes, self._size_for(max(0, free_bytes - self._size_for(0))))
        os.ftruncate(descriptor, self.rows_start)
        if os.fstat(descriptor).st_blocks * BLOCK_BYTES >= self.rows_start:
            # A file system without holes, such as exFAT's, would take all of the size at once.
            size = min(size, self._size_for(self.expected_bytes))
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, self.rows_start)
        return size

    def _size_for(self, rows_bytes: int) -> int:
        # One row more, never touched, so that each unit begins a window of a whole row.
        rows_bytes -= rows_bytes % ALIGN_BYTES
        return self.rows_start + rows_bytes + self.layout.row_bytes


def _room(descriptor: int) -> int:
    """Return how many bytes a file can take, by its system and by this process's limit."""
    system = os.fstatvfs(descriptor)
    free_bytes = system.f_bavail * system.f_frsize
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return free_bytes if limit == resource.RLIM_INFINITY else min(free_bytes, limit)

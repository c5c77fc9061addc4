"""Lay a store's rows out in a file, and map it into memory.

file:  | fingerprint, condemned | stamp, check, length | ... | row 0 | row 1 | ...

Every byte is reserved when the file is made: the first write to a full file system would else kill
the process with SIGBUS.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autocache.layout import ALIGN_BYTES, RowLayout, round_up

WORD_BYTES = 8
TAG_WORDS = 3
"""Of a row: its stamp, its check value, and the length of its varying fields."""

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class FileShape:
    """State what a file holds: rows of a layout."""

    layout: RowLayout
    num_rows: int

    @property
    def rows_start(self) -> int:
        """Return where the first row begins, in bytes."""
        return round_up(ALIGN_BYTES + TAG_WORDS * WORD_BYTES * self.num_rows, _PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the file."""
        return self.rows_start + self.num_rows * self.layout.row_bytes

    @property
    def fingerprint(self) -> np.uint64:
        """Return what tells this shape from others."""
        text = repr((self.layout, self.num_rows))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return np.uint64(int.from_bytes(digest, "little"))


def reserve(descriptor: int, path: Path, shape: FileShape) -> mmap.mmap:
    """Map a new file's every byte, with all rows empty.

    Raises:
        ValueError: there are no rows.
        OSError: the file system has too little space.
    """
    if shape.num_rows < 1:
        raise ValueError(f"a row store has {shape.num_rows} rows; give at least 1, or no store")
    try:
        os.posix_fallocate(descriptor, 0, shape.num_bytes)
        mapping = mmap.mmap(descriptor, shape.num_bytes)
        np.frombuffer(mapping, np.uint64, count=1)[0] = shape.fingerprint
        return mapping
    except OSError as error:
        free = os.fstatvfs(descriptor)
        raise OSError(
            error.errno,
            f"the cache needs {shape.num_bytes} bytes at {path} and could not get them "
            f"({error.strerror}; {free.f_bavail * free.f_frsize} bytes are free); "
            "cache fewer rows, or put the file on a larger file system",
        ) from error


def open_mapping(path: Path, shape: FileShape) -> mmap.mmap:
    """Map a file that another process of this node has made.

    Raises:
        FileNotFoundError: `path` was not created yet, or is unlinked already.
        ValueError: the file was created with another layout or number of rows.
    """
    with open(path, "rb+") as file:
        found = os.fstat(file.fileno()).st_size
        if found == shape.num_bytes:
            mapping = mmap.mmap(file.fileno(), found)
            if np.frombuffer(mapping, np.uint64, count=1)[0] == shape.fingerprint:
                return mapping
    raise ValueError(
        f"cache file {path} of {found} bytes has another layout than the {shape.num_rows} rows of "
        f"{shape.layout.fields} asked for ({shape.num_bytes} bytes); open it as it was created"
    )

"""Let one process at a time write a row of a file that several processes share.

A claim is a lock of the kernel's on one byte, whose number is the row's. The kernel drops it when
the process dies, however it dies. Nobody waits for a claim: who does not get it leaves the row to
the process that has it.

Locks belong to the open file, not to the process. So two stores of one process exclude each other,
too, and closing one leaves the other's claims alone.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np

_FLOCK = "hhqqi0q"
"""C's struct flock of Linux: kind, whence, start, length, process; filled up to whole words."""


@final
class RowClaims:
    """Claim rows of an open file; the descriptor is open for writing, and stays the caller's.

    Raises:
        OSError: the file system has no such locks.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._set(fcntl.F_UNLCK, 0)

    @contextmanager
    def claimed(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Claim rows within the block; give the (B,) bool mask of those that it got."""
        got = np.zeros(len(rows), bool)
        numbers = rows.tolist()
        try:
            for place, row in enumerate(numbers):
                got[place] = self._set(fcntl.F_WRLCK, row)
            yield got
        finally:
            for row, is_ours in zip(numbers, got.tolist(), strict=True):
                if is_ours:
                    self._set(fcntl.F_UNLCK, row)

    def _set(self, kind: int, row: int) -> bool:
        """Set or drop one lock at once; False if another open file has it."""
        request = struct.pack(_FLOCK, kind, os.SEEK_SET, row, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except BlockingIOError:
            return False
        return True

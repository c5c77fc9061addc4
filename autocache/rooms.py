"""Give rows of unequal lengths their rooms in a file that several processes share.

taken by process   A      B    A            cursor
                   | ...  | .. | ....       |       free, not yet reserved
                     a row's room

A process takes an extent from the file's cursor, reserves it, and deals rooms out of it. It takes
a long row, or a batch of them, by itself. So what is taken is what rows are long, beside the rest
of an extent. A room that a longer row has left is not given to another.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import numpy as np

from autocache.layout import ALIGN_BYTES, HEADER_WORDS, TAKEN, TOLD, WRITER, FileShape

_LOGGER = logging.getLogger(__name__)

EXTENT_BYTES = 1 << 20
_LEAST_EXTENTS = 64
"""Into which a small file is dealt, so that a process does not take all of it."""
_SIZE_BITS = 26
"""Of a room's word, for its units: rows of 4 GiB at most. The others say where it begins."""
_MOST_SIZE, _MOST_UNITS = (1 << _SIZE_BITS) - 1, 1 << (64 - _SIZE_BITS)
_SIZE_MASK, _SIZE_SHIFT = np.uint64(_MOST_SIZE), np.uint64(_SIZE_BITS)
_POPULATE = 23
"""MADV_POPULATE_WRITE, which `mmap` has no name for."""
_HAS_FILE_LOCK = threading.Lock()
"""Held by the thread that has the file's lock, which is a process's as a whole."""


@final
class Rooms:
    """Deal rooms of a file, or of memory.

    Args:
        path: for warnings.
        mapping: of all of the file; its header is changed.
        descriptor: of the file, copied; None for memory.
    """

    def __init__(
        self, path: Path, shape: FileShape, mapping: mmap.mmap, descriptor: int | None
    ) -> None:
        self._path, self._mapping, self._descriptor = path, mapping, descriptor
        self._header = np.frombuffer(mapping, np.uint64, count=HEADER_WORDS)
        self._num_units = min(shape.num_units(len(mapping)), _MOST_UNITS)
        self._rows_start = shape.rows_start
        self._extent = min(EXTENT_BYTES // ALIGN_BYTES, self._num_units // _LEAST_EXTENTS)
        self._next = self._end = 0
        self._is_full = False
        if descriptor is not None:
            self._descriptor = os.dup(descriptor)
            weakref.finalize(self, os.close, self._descriptor)

    @property
    def num_taken(self) -> int:
        """Return the units that processes have reserved; none of the others may be touched."""
        return min(int(self._header[TAKEN]), self._num_units)

    def take(self, rooms: np.ndarray, units: np.ndarray) -> np.ndarray:
        """Return (B,) rooms with these units: those given where they suffice; 0 for no room.

        Rows without units have room everywhere, so they are given one of a unit.
        """
        units = np.maximum(units, 1)
        sizes = (rooms & _SIZE_MASK).view(np.int64)
        # A damaged room must not lead behind what is taken.
        has_room = (sizes >= units) & (starts_of(rooms) + sizes <= self.num_taken)
        if has_room.all():
            return rooms
        taken = np.where(has_room, rooms, np.uint64(0))
        lacking = np.flatnonzero(~has_room).tolist()
        needs = units[lacking].tolist()
        for place, (row, need) in enumerate(zip(lacking, needs, strict=True)):
            if need > self._end - self._next:
                self._extend(need, sum(needs[place:]))
            if need <= self._end - self._next:
                taken[row] = self._next << _SIZE_BITS | need
                self._next += need
        return taken

    def _extend(self, need: int, batch: int) -> None:
        """Take an extent for a batch's units, or for its next row's where there is no more."""
        if self._is_full:
            return
        num, cause = 0, "it is full"
        try:
            with self._locked():
                first = int(self._header[TAKEN])
                left = self._num_units - first
                if need <= min(left, _MOST_SIZE):
                    num = self._reserved(first, need, min(max(batch, self._extent), left))
                    self._header[TAKEN] = first + num
        except OSError as error:
            cause = str(error)
        if num == 0:
            self._is_full = True
            self._warn(cause)
            return
        # What follows on an extent goes on with it, so that its rest is not lost.
        self._next = self._next if first == self._end else first
        self._end = first + num
        start = self._rows_start + first * ALIGN_BYTES
        beside = start % mmap.PAGESIZE
        # One call maps all pages, which else fault one by one. Kernels before 5.14 have none.
        with suppress(OSError):
            self._mapping.madvise(_POPULATE, start - beside, num * ALIGN_BYTES + beside)

    def _reserved(self, first: int, need: int, wanted: int) -> int:
        """Reserve units from the first on; return how many: those wanted, or those in need."""
        if self._descriptor is None:
            return wanted
        start = self._rows_start + first * ALIGN_BYTES
        try:
            os.posix_fallocate(self._descriptor, start, wanted * ALIGN_BYTES)
        except OSError:
            if need == wanted:
                raise
            os.posix_fallocate(self._descriptor, start, need * ALIGN_BYTES)
            return need
        return wanted

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let nobody else take an extent within the block."""
        with _HAS_FILE_LOCK:
            if self._descriptor is None:
                yield
                return
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _warn(self, cause: str) -> None:
        """Warn once in all processes of a run."""
        run = self._header[WRITER] + np.uint64(1)
        if self._header[TOLD] != run:
            self._header[TOLD] = run
            _LOGGER.warning(
                "cache file %s takes no more rows, as %s; samples without a row are computed at "
                "every step. cache_limit_bytes= allows more, cache_folder= names another place, "
                "cache_dtype= makes rows smaller",
                self._path,
                cause,
            )


def starts_of(rooms: np.ndarray) -> np.ndarray:
    """Return where rooms begin, (B,) int64 units."""
    return (rooms >> _SIZE_SHIFT).view(np.int64)

"""Store one row per sample in a memory-mapped file that all processes of a node share.

A row is valid to a reader who knows its stamp. A writer clears the stamp, writes the bytes and the
check value, then publishes the stamp. A reader reads the stamp before and after copying the bytes,
and sums the copy. So a row that is half written, overwritten meanwhile, or damaged is a miss,
without locks.

Source: AutoCache, PipeTransformer section 3.4, keeps a dictionary of files in shared memory. Ours
is one file, written in place. Rows of one length have slots that are reserved when it is created;
rows that vary take rooms of their own length. A room needs no check of its own: the sum is of what
lies there.
"""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, NewRows, RowRead, Rows, Stamps
from autocache.checksum import check_values, copy_in, copy_out, factors_of
from autocache.layout import (
    ALIGN_BYTES,
    CONDEMNED,
    HEADER_WORDS,
    WORD_BYTES,
    WRITER,
    FileShape,
    RowField,
    RowLayout,
    round_up,
    units_of,
)
from autocache.rooms import Rooms, starts_of
from autocache.row_pool import RowPool

_LOGGER = logging.getLogger(__name__)


class NamelessFilesError(OSError):
    """Say that files without a name cannot be made here; files with a name can."""


class RowStore(ActivationStore):
    """Read and write rows by id; made by `create` in one process and `open` in others.

    Every process closes its own; the file can be opened until the creator unlinks it or closes.
    Several processes may read and write at once.
    """

    def __init__(
        self,
        path: Path,
        shape: FileShape,
        *,
        mapping: mmap.mmap,
        descriptor: int | None = None,
        unlink: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a file, which stays mapped while these arrays live; for `create` and `open`.

        A descriptor is copied; None is memory.
        """
        layout, num_rows = shape.layout, shape.num_rows
        super().__init__(layout, num_rows)
        self.path, self._shape = path, shape
        self._has_warned, self._unlink = False, unlink
        self._mapping: mmap.mmap | None = mapping
        self._header = np.frombuffer(mapping, np.uint64, count=HEADER_WORDS)
        self._tags = np.frombuffer(
            mapping, np.uint64, count=shape.tag_words * num_rows, offset=ALIGN_BYTES
        ).reshape(num_rows, shape.tag_words)
        row_words = layout.row_bytes // WORD_BYTES
        num_words = (len(mapping) - shape.rows_start) // WORD_BYTES
        words = torch.frombuffer(
            mapping, dtype=torch.int64, count=num_words, offset=shape.rows_start
        )
        factors = factors_of(row_words)
        self._rooms = Rooms(path, shape, mapping, descriptor) if layout.varies else None
        self._fixed_units = layout.fixed_bytes // ALIGN_BYTES
        num_units = shape.num_units(len(mapping))
        # Each field's words in the file, and the factors of their check.
        self._parts: list[tuple[RowField, Tensor, np.ndarray]] = []
        offset, check_at = 0, dict(zip(layout.fields, layout.offsets, strict=False))
        # What follows a field that varies would begin elsewhere in each row.
        for field in sorted(layout.fields, key=lambda field: field.varies):
            num = field.num_words
            if layout.varies:
                # A window begins at each unit, and overlaps the next ones.
                table = words.as_strided((num_units, num), (ALIGN_BYTES // WORD_BYTES, 1), offset)
            else:
                table = words.view(num_rows, row_words).narrow(1, offset, num)
            first = check_at[field] // WORD_BYTES
            self._parts.append((field, table, factors[first : first + num]))
            offset += 0 if field.varies else round_up(num * WORD_BYTES, ALIGN_BYTES) // WORD_BYTES

    @classmethod
    def create(
        cls,
        path: str | Path,
        layout: RowLayout,
        num_rows: int,
        *,
        limit_bytes: int | None = None,
    ) -> RowStore:
        """Create the file, in /dev/shm for memory, all rows empty, and reserve every byte of it.

        Rows that vary reserve theirs when they are first written. Where there is no room for one
        by then, it is not kept, with one warning.

        Args:
            limit_bytes: the most that rows take where they vary.
        Raises:
            ValueError: `num_rows` is less than 1.
            FileExistsError: `path` exists.
            OSError: the file system has too little space, also for rows of the expected length.
        """
        shape = FileShape(layout, num_rows, limit_bytes)
        path = Path(path)
        with open(path, "xb+", opener=partial(os.open, mode=0o600)) as file:
            try:
                mapping = shape.reserve(file.fileno(), path)
                unlink = partial(path.unlink, missing_ok=True)
                return cls(path, shape, mapping=mapping, descriptor=file.fileno(), unlink=unlink)
            except BaseException:
                path.unlink()
                raise

    @classmethod
    def in_memory(cls, layout: RowLayout, num_rows: int) -> RowStore:
        """Make a store that no other process can open, on no file system."""
        shape = FileShape(layout, num_rows)
        mapping = shape.prepare(mmap.mmap(-1, shape.num_bytes))
        return cls(Path("memory"), shape, mapping=mapping)

    @classmethod
    def create_nameless(
        cls, folder: Path, layout: RowLayout, num_rows: int, *, limit_bytes: int | None = None
    ) -> RowStore:
        """Create a file without a name in a folder, so that a kill at any moment leaves nothing.

        Other processes open it by `path`, which leads through this process's descriptor.

        Raises:
            ValueError, OSError: see `create`.
            NamelessFilesError: the platform or the file system has no such files.
        """
        if sys.platform != "linux":
            raise NamelessFilesError(errno.EOPNOTSUPP, "only Linux has files without a name")
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            # These two errors say that the file system, or the kernel, has no such files.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            raise NamelessFilesError(error.errno, f"{folder}: {error.strerror}") from error
        try:
            shape = FileShape(layout, num_rows, limit_bytes)
            mapping = shape.reserve(descriptor, folder)
            path, unlink = (
                Path(f"/proc/{os.getpid()}/fd/{descriptor}"),
                partial(os.close, descriptor),
            )
            return cls(path, shape, mapping=mapping, descriptor=descriptor, unlink=unlink)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: str | Path, layout: RowLayout, num_rows: int) -> RowStore:
        """Map a file that another process of this node has created.

        Raises:
            FileNotFoundError: `path` was not created yet, or is unlinked already.
            ValueError: the file was created with another layout or number of rows.
        """
        with Path(path).open("rb+") as file:
            shape = FileShape(layout, num_rows)
            mapping = shape.open(file.fileno(), Path(path))
            return cls(Path(path), shape, mapping=mapping, descriptor=file.fileno())

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def unlink(self) -> None:
        """Remove the name; the creator calls it once all processes have opened the file.

        Every mapping stays valid, and the last one frees the file, even after a SIGKILL.
        """
        # Once only: later the name, or the descriptor, may belong to another file.
        unlink, self._unlink = self._unlink, None
        if unlink is not None:
            unlink()

    def close(self) -> None:
        """Unmap the file, and unlink it if this process created it and has not yet."""
        self.unlink()
        # The last array to go unmaps the file; by hand it fails while a traceback holds one.
        self._mapping = None
        self._parts.clear()
        self._header, self._rooms = np.zeros(HEADER_WORDS, np.uint64), None
        self._tags = np.empty((0, self._shape.tag_words), np.uint64)

    @property
    def num_bytes(self) -> int:
        """Return what the store has reserved: of rows that vary, what is written by now."""
        if not self.layout.varies:
            return self._shape.num_bytes
        rooms = self._rooms
        taken = 0 if rooms is None else rooms.num_taken
        return self._shape.rows_start + taken * ALIGN_BYTES

    def is_condemned(self) -> bool:
        return bool(self._header[CONDEMNED])

    def condemn(self) -> bool:
        """Let no process read a row any more; return whether this call was the first."""
        first = not self.is_condemned()
        self._header[CONDEMNED] = 1
        return first

    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        slots, fits = self._slots(ids)
        tags = self._tags[slots]
        before, lengths = tags[:, 0], tags[:, 2]
        depth = self._depths(before, fits, stamps)
        found = depth > 0
        buffers = self.buffers(len(slots)) if out is None else out
        own = self._own_words(lengths)
        places, is_there = self._places(slots, tags, own, found)
        rows, sums = self._gather(places, is_there, own, buffers, pool)
        # Read again: a writer may have been at work while the rows were copied.
        tags = self._tags[slots]
        after, checks = tags[:, 0], tags[:, 1]
        intact = is_there & (check_values(sums, slots, before, lengths) == checks)
        depth *= intact & (after == before)
        # A stamp that changed belongs to a writer at work; only an unchanged one proves damage.
        corrupt = found & (after == before) & ~intact
        # Emptied, so that nobody looks for them there again, and written elsewhere if they vary:
        # two rows may share a room after a crash of the machine.
        self._tags[slots[corrupt]] = 0
        return RowRead(torch.from_numpy(depth), rows, int(np.count_nonzero(corrupt)))

    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        slots, fits = self._slots(ids)
        return torch.from_numpy(self._depths(self._tags[slots, 0], fits, stamps))

    def expect(self, ids: Tensor) -> None:
        slots, fits = self._slots(ids)
        if self._mapping is None or sys.platform != "linux":
            return
        tags = self._tags[slots]
        own = self._own_words(tags[:, 2])
        places, is_there = self._places(slots, tags, own, fits)
        unit_bytes = self.layout.row_bytes if self._rooms is None else ALIGN_BYTES
        starts = self._shape.rows_start + places * unit_bytes
        besides = starts % mmap.PAGESIZE
        sizes = besides + self._units(own) * ALIGN_BYTES
        for place in is_there.nonzero()[0]:
            start, size = int(starts[place] - besides[place]), int(sizes[place])
            self._mapping.madvise(mmap.MADV_WILLNEED, start, size)

    def warn_of_damage(self, read: RowRead) -> None:
        if read.num_corrupt and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "cache file %s: rows fail their check and are recomputed, now %d; its memory or "
                "disk is damaged (later ones are not told of)",
                self.path,
                read.num_corrupt,
            )

    def clear(self, ids: Tensor) -> None:
        slots, fits = self._slots(ids)
        self._tags[slots[fits], 0] = 0

    def settle(self) -> None:
        """Return at once: a row is there as soon as it is written."""

    @property
    def writer(self) -> int:
        """Return the number of the run that writes kept rows; 0 for none."""
        return int(self._header[WRITER])

    @writer.setter
    def writer(self, run: int) -> None:
        self._header[WRITER] = run

    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        slots, fits = self._slots(ids)
        _checked_stamp(stamp)
        if self.is_condemned():
            return
        values = {name: row if isinstance(row, Tensor) else row() for name, row in rows.items()}
        self.layout.check(values, len(slots))
        slots, kept = slots[fits], torch.from_numpy(fits.nonzero()[0])
        if lengths is None:
            own = np.full(len(slots), np.iinfo(np.uint64).max)
        else:
            own = lengths[kept].numpy().astype(np.uint64)
        # Before any byte changes: a reader must not find the old stamp over new bytes.
        self._tags[slots, 0] = 0
        own_words, places = self._own_words(own), slots
        if self._rooms is not None:
            rooms = self._rooms.take(self._tags[slots, 3], self._units(own_words))
            if not rooms.all():
                has_room = rooms > 0
                slots, kept, own = slots[has_room], kept[has_room], own[has_room]
                rooms, own_words = rooms[has_room], self._own_words(own)
            places = starts_of(rooms)
        sums = np.zeros(len(slots), np.uint64)
        for (field, words, factors), num in zip(self._parts, own_words, strict=True):
            value = values[field.name].detach().cpu()
            value = value if len(kept) == len(value) else value.index_select(0, kept)
            sums += copy_in(places, field.as_words(value), words, num, factors)
            if num is not None and field is not self._parts[-1][0]:
                places = places + units_of(num)  # The next field that varies begins behind it.
        if self._rooms is not None:
            self._tags[slots, 3] = rooms
        self._tags[slots, 2] = own
        # Place, stamp and length enter the check: bytes never pass under another of them.
        self._tags[slots, 1] = check_values(sums, slots, np.uint64(stamp), own)
        self._tags[slots, 0] = stamp

    def _own_words(self, lengths: np.ndarray) -> list[np.ndarray | None]:
        """Return each field's (B,) words in rows of these lengths; None where all have all."""
        return [field.own_words(lengths) for field, _, _ in self._parts]

    def _units(self, own_words: Sequence[np.ndarray | None]) -> np.ndarray:
        """Return the units of 64 bytes that rows take, (B,), or () where all take the same."""
        varying = (units_of(words) for words in own_words if words is not None)
        return sum(varying, np.array(self._fixed_units))

    def _places(
        self,
        slots: np.ndarray,
        tags: np.ndarray,
        own_words: Sequence[np.ndarray | None],
        found: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows are in their fields' tables, and which of those found can be there."""
        if self._rooms is None:
            return slots, found
        # A hole in the file must not be touched: its system may have no room for it.
        places = starts_of(tags[:, 3])
        return places, found & (places + self._units(own_words) <= self._rooms.num_taken)

    def _depths(self, found: np.ndarray, fits: np.ndarray, stamps: Stamps) -> np.ndarray:
        """Return the depth of each stamp that was found, 0 for none."""
        wanted = np.array([_checked_stamp(stamp) for stamp in stamps], np.uint64)
        ranks = np.arange(1, len(wanted) + 1)
        usable = fits & (not self.is_condemned())
        depths: np.ndarray = np.max((found[:, None] == wanted) * ranks, axis=1, initial=0) * usable
        return depths

    def _slots(self, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return each id's row number, 0 where it has none, and the (B,) mask of those it has."""
        if not self._parts:
            raise ValueError(f"the store of {self.path} is closed; use it inside its `with`")
        is_plain = (ids.dtype, ids.device.type, ids.dim()) == (torch.int64, "cpu", 1)
        slots = ids.numpy() if is_plain else None
        if slots is None or (slots < 0).any():
            raise ValueError(f"sample_ids are {ids}; give dataset indices, (B,) int64, CPU")
        fits = slots < self.num_rows
        return slots * fits, fits

    def _gather(
        self,
        places: np.ndarray,
        found: np.ndarray,
        own_words: Sequence[np.ndarray | None],
        buffers: Mapping[str, Tensor],
        pool: RowPool | None,
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        """Copy rows out of the file; return them and the (B,) uint64 sums of what was copied."""
        num, rows = len(places), {}
        sums = np.zeros(num, np.uint64)

        def copy(part: slice) -> None:
            source = places[part]
            for (field, words, factors), lengths in zip(self._parts, own_words, strict=True):
                own, out = None if lengths is None else lengths[part], buffers[field.name][part]
                sums[part] += copy_out(source, words, out, factors, found=found[part], own=own)
                if own is not None and field is not self._parts[-1][0]:
                    source = source + units_of(own)

        if pool is None:
            copy(slice(0, num))
        else:
            pool.each(copy, num, num_bytes=num * self.layout.row_bytes)
        for field, _, _ in self._parts:
            values = buffers[field.name][:num].view(field.dtype)
            # A field whose bytes are no whole words is filled up behind its last value.
            if (num_values := math.prod(field.shape)) < values.shape[1]:
                values = values[:, :num_values].contiguous()
            rows[field.name] = values.view(num, *field.shape)
        return rows, sums


def _checked_stamp(stamp: int) -> int:
    if not 0 < stamp < 2**64:
        raise ValueError(f"stamp {stamp} is out of range; give 0 < stamp < 2**64")
    return stamp

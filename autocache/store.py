"""Store one row per sample in a memory-mapped file that all processes of a node share.

A row is valid for whoever knows its stamp. A writer clears the stamp, writes the bytes and the
check value, then publishes the stamp; a reader reads the stamp before and after copying the bytes
and sums the copy. So a row half written, overwritten while it was read, or damaged is a miss,
without locks.

Source: AutoCache, PipeTransformer section 3.4, keeps a dictionary of files in shared memory. Ours
is one file of fixed slots, written in place, whose size is reserved when it is created. Of a row
whose length varies only its own bytes are touched.
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

from autocache.activation_store import FurtherRows, RowRead
from autocache.layout import ALIGN_BYTES, TAG_WORDS, WORD_BYTES, FileShape, RowField, RowLayout
from autocache.row_copy import as_words, copy_in, copy_out, factors_of, num_words, own_words

_LOGGER = logging.getLogger(__name__)


class NamelessFilesError(OSError):
    """Say that files without a name cannot be made here; others can."""


class RowStore:
    """Read and write rows by sample id; made by `create` in one process and `open` in others.

    A context manager. Every process closes its own; the file can be opened until the creator
    unlinks it or closes. Reads may run while another process writes; two processes may write at
    once.
    """

    reads_ahead = True

    def __init__(
        self,
        path: Path,
        layout: RowLayout,
        num_rows: int,
        *,
        mapping: mmap.mmap,
        unlink: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a mapped file, which stays mapped while these arrays live; for `create`, `open`."""
        self.path, self.layout, self.num_rows = path, layout, num_rows
        self._has_warned = False
        self._unlink = unlink
        shape = FileShape(layout, num_rows)
        self.num_bytes = shape.num_bytes
        self._header = np.frombuffer(mapping, np.uint64, count=2)
        self._tags = np.frombuffer(
            mapping, np.uint64, count=TAG_WORDS * num_rows, offset=ALIGN_BYTES
        ).reshape(num_rows, TAG_WORDS)
        row_words = layout.row_bytes // WORD_BYTES
        table = torch.frombuffer(
            mapping, dtype=torch.int64, count=num_rows * row_words, offset=shape.rows_start
        ).view(num_rows, row_words)
        factors = factors_of(row_words)
        # Each field's words in the file, and the factors of their check.
        self._parts: list[tuple[RowField, Tensor, np.ndarray]] = []
        for field, offset in zip(layout.fields, layout.offsets, strict=False):
            start, num = offset // WORD_BYTES, num_words(field)
            self._parts.append((field, table.narrow(1, start, num), factors[start : start + num]))

    @classmethod
    def create(cls, path: str | Path, layout: RowLayout, num_rows: int) -> RowStore:
        """Create the file, all rows empty, and reserve every byte of it.

        Args:
            path: a new file; in /dev/shm for memory, anywhere else for disk.
            num_rows: sample ids 0..num_rows-1 have a row; others are never stored.
        Raises:
            ValueError: `num_rows` is less than 1.
            FileExistsError: `path` exists.
            OSError: the file system has too little space. Without the reservation the first write
                to a full /dev/shm would kill the process with SIGBUS.
        """
        path = Path(path)
        with open(path, "xb+", opener=partial(os.open, mode=0o600)) as file:
            try:
                mapping = FileShape(layout, num_rows).reserve(file.fileno(), path)
            except BaseException:
                path.unlink()
                raise
        unlink = partial(path.unlink, missing_ok=True)
        return cls(path, layout, num_rows, mapping=mapping, unlink=unlink)

    @classmethod
    def in_memory(cls, layout: RowLayout, num_rows: int) -> RowStore:
        """Make a store that no other process can open, on no file system."""
        mapping = mmap.mmap(-1, FileShape(layout, num_rows).num_bytes)
        return cls(Path("memory"), layout, num_rows, mapping=mapping)

    @classmethod
    def create_nameless(cls, folder: Path, layout: RowLayout, num_rows: int) -> RowStore:
        """Create the file without a name: a kill at any moment leaves nothing behind.

        Other processes open it by `path`, which leads through this one's descriptor.

        Args:
            folder: on the file system that gives the space.
        Raises:
            ValueError, OSError: see `create`.
            NamelessFilesError: the platform or the file system has no such files.
        """
        if sys.platform != "linux":
            raise NamelessFilesError(errno.EOPNOTSUPP, "only Linux has files without a name")
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            # So do file systems and kernels say that they have none.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            raise NamelessFilesError(error.errno, f"{folder}: {error.strerror}") from error
        try:
            mapping = FileShape(layout, num_rows).reserve(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        unlink = partial(os.close, descriptor)
        return cls(path, layout, num_rows, mapping=mapping, unlink=unlink)

    @classmethod
    def open(cls, path: str | Path, layout: RowLayout, num_rows: int) -> RowStore:
        """Map a file that another process of this node has created.

        Raises:
            FileNotFoundError, ValueError: see `FileShape.open`.
        """
        path = Path(path)
        mapping = FileShape(layout, num_rows).open(path)
        return cls(path, layout, num_rows, mapping=mapping)

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def unlink(self) -> None:
        """End the time in which it can be opened; its creator calls it once all have opened it.

        Every mapping of the file stays valid and the last one frees it, even after a SIGKILL.
        """
        # Once only: by the time of close the name, or the descriptor, may belong to another file.
        unlink, self._unlink = self._unlink, None
        if unlink is not None:
            unlink()

    def close(self) -> None:
        """Unmap the file, and unlink it if this process created it and has not yet."""
        self.unlink()
        # The last array to go unmaps the file; unmapping by hand fails while a traceback has one.
        self._parts.clear()
        self._header = np.zeros(2, np.uint64)
        self._tags = np.empty((0, TAG_WORDS), np.uint64)

    @property
    def is_condemned(self) -> bool:
        """Tell whether a process has found that the rows are of no use."""
        return bool(self._header[1])

    def condemn(self) -> bool:
        """Let no process of the node read a row any more; tell whether this call was the first."""
        first = not self.is_condemned
        self._header[1] = 1
        return first

    def holds(self, check: Callable[[], bool]) -> bool:
        """Check at once."""
        return check()

    def read(
        self,
        sample_ids: Tensor,
        depth_stamps: Sequence[int],
        *,
        into: Mapping[str, Tensor] | None = None,
        in_background: bool = False,
    ) -> RowRead:
        """Read the rows of a batch whose stamp is one of those given.

        Args:
            sample_ids: (B,) int64 on CPU; duplicates are fine, ids without a row are misses.
            depth_stamps: the stamps that count as hits, none of them 0.
            into: tensors from `buffers`, for B rows or more, that the rows are copied into; fresh
                memory costs as much as the copy.
            in_background: whether a thread reads, beside what is computed: it leaves torch's
                threads to that, and warning to `warn_of_damage`.
        Raises:
            ValueError: see `write`.
        """
        ids, fits = self._slots(sample_ids)
        before, _, lengths = self._tags[ids].T
        depth = self._depths(before, fits, depth_stamps)
        found = depth > 0
        buffers = self.buffers(len(ids)) if into is None else into
        rows, sums = self._gather(ids, found, lengths, buffers, in_background=in_background)
        after, checks, _ = self._tags[ids].T
        intact = _check_values(sums, ids, before, lengths) == checks
        depth *= intact & (after == before)
        # A stamp that changed belongs to a writer at work; only an unchanged one proves damage.
        corrupt = found & (after == before) & ~intact
        read = RowRead(torch.from_numpy(depth), rows, int(np.count_nonzero(corrupt)))
        if not in_background:
            self.warn_of_damage(read)
        return read

    def find(self, sample_ids: Tensor, depth_stamps: Sequence[int]) -> Tensor:
        """Return the (B,) depths that `read` would find rows at, unless they are damaged."""
        ids, fits = self._slots(sample_ids)
        return torch.from_numpy(self._depths(self._tags[ids, 0], fits, depth_stamps))

    def warn_of_damage(self, read: RowRead) -> None:
        """Warn of damaged rows that were read, if they are the first."""
        if read.num_corrupt and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "cache file %s: rows fail their check and are recomputed, now %d; its memory or "
                "disk is damaged (later ones are not told of)",
                self.path,
                read.num_corrupt,
            )

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        """Return memory for `read` to copy so many rows into, page-locked if need be."""
        return {
            field.name: torch.empty(num, num_words(field), dtype=torch.int64, pin_memory=pinned)
            for field in self.layout.fields
        }

    def clear(self, sample_ids: Tensor) -> None:
        """Let the rows of a batch be found under no stamp."""
        ids, fits = self._slots(sample_ids)
        self._tags[ids[fits], 0] = 0

    def settle(self) -> None:
        """Return at once: rows are there as soon as they are written."""

    def write(
        self,
        sample_ids: Tensor,
        stamp: int,
        rows: Mapping[str, Tensor],
        lengths: Tensor | None = None,
        *,
        also: FurtherRows | None = None,
    ) -> None:
        """Write the rows of a batch in place; ids without a row are left out.

        Args:
            sample_ids: (B,) int64 on CPU, each once.
            stamp: what the rows have passed through, 0 < stamp < 2**64.
            rows: every field of the layout and no other, (B, *shape), any device.
            lengths: (B,) int64 on CPU, entries of each row's varying fields; None for all.
            also: gives those fields that `rows` lacks.
        Raises:
            ValueError: ids that are negative or not (B,) int64 on CPU, a stamp out of range, rows
                that do not match the layout, or a closed store.
        """
        ids, fits = self._slots(sample_ids)
        _checked_stamp(stamp)
        if self.is_condemned:
            return
        rows = {**rows, **also()} if also is not None else rows
        check_rows(self.layout, rows, len(ids))
        kept = torch.from_numpy(fits).nonzero().flatten()
        ids = ids[fits]
        own = (
            np.full(len(ids), np.iinfo(np.uint64).max)
            if lengths is None
            else (lengths[kept].numpy().astype(np.uint64))
        )
        self._tags[ids, 0] = 0
        sums = np.zeros(len(ids), np.uint64)
        for field, words, factors in self._parts:
            values = rows[field.name].detach().cpu()
            values = values if len(kept) == len(values) else values.index_select(0, kept)
            sums += copy_in(ids, as_words(field, values), words, own_words(field, own), factors)
        self._tags[ids, 2] = own
        # Place, stamp and length enter the check, so that no bytes ever pass under another.
        self._tags[ids, 1] = _check_values(sums, ids, np.uint64(stamp), own)
        self._tags[ids, 0] = stamp

    def _depths(self, found: np.ndarray, fits: np.ndarray, stamps: Sequence[int]) -> np.ndarray:
        """Return at which depth each of the stamps found stands, 0 for none."""
        wanted = np.array([_checked_stamp(stamp) for stamp in stamps], np.uint64)
        ranks = np.arange(1, len(wanted) + 1)
        usable = fits & (not self.is_condemned)
        depths: np.ndarray = np.max((found[:, None] == wanted) * ranks, axis=1, initial=0) * usable
        return depths

    def _slots(self, sample_ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return each id's row number, 0 where it has none, and the (B,) mask of those it has."""
        if not self._parts:
            raise ValueError(f"the store of {self.path} is closed; use it inside its `with`")
        form = (sample_ids.dtype, sample_ids.device.type, sample_ids.dim())
        ids = sample_ids.numpy() if form == (torch.int64, "cpu", 1) else None
        if ids is None or (ids < 0).any():
            raise ValueError(f"sample_ids are {sample_ids}; give dataset indices, (B,) int64, CPU")
        fits = ids < self.num_rows
        return ids * fits, fits

    def _gather(
        self,
        ids: np.ndarray,
        found: np.ndarray,
        lengths: np.ndarray,
        buffers: Mapping[str, Tensor],
        *,
        in_background: bool,
    ) -> tuple[dict[str, Tensor], np.ndarray]:
        """Copy rows out of the file; return them and the (B,) uint64 sums of what was copied."""
        # Unwanted rows repeat a wanted one: it is in the CPU's cache, and one call copies all.
        source = np.where(found, ids, ids.max(initial=0, where=found))
        sums, rows, any_found = np.zeros(len(ids), np.uint64), {}, bool(found.any())
        for field, words, factors in self._parts:
            copied = buffers[field.name][: len(ids)]
            if any_found:
                own = own_words(field, lengths)
                sums += copy_out(source, words, copied, own, factors, in_background=in_background)
            values = copied.view(field.dtype)
            if (num_values := math.prod(field.shape)) < values.shape[1]:
                values = values[:, :num_values].contiguous()
            rows[field.name] = values.view(len(ids), *field.shape)
        return rows, sums


def check_rows(layout: RowLayout, rows: Mapping[str, Tensor], num: int) -> None:
    """Raise a ValueError for rows that are not as a layout says."""
    given = {name: (tuple(row.shape), row.dtype) for name, row in rows.items()}
    wanted = {field.name: ((num, *field.shape), field.dtype) for field in layout.fields}
    if given != wanted:
        raise ValueError(
            f"rows {given} do not match the store's {wanted}; every sample needs the same "
            "shapes and dtypes, so pad each sample to a fixed length or use no store"
        )


def _check_values(
    sums: np.ndarray, ids: np.ndarray, stamps: np.ndarray | np.uint64, lengths: np.ndarray
) -> np.ndarray:
    """Return the check values of rows by their words' checks, places, stamps and lengths."""
    # Odd factors, so that what differs by as much in two of them is not taken for equal.
    places = ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    return (sums + places + lengths * np.uint64(0x9E3779B97F4A7C15)) ^ stamps


def _checked_stamp(stamp: int) -> int:
    if not 0 < stamp < 2**64:
        raise ValueError(f"stamp {stamp} is out of range; give 0 < stamp < 2**64")
    return stamp

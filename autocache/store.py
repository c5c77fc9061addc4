"""Store one row per sample in a memory-mapped file that all processes of a node share.

    file:  | fingerprint | stamp, check | stamp, check | ... | row 0 | row 1 | ...
    row:   | field | pad | field | pad |        each field starts at a multiple of 64 bytes

A row is valid for whoever knows its stamp. A writer clears the stamp, writes the bytes and the
check value, then publishes the stamp; a reader reads the stamp before and after copying the bytes
and sums the copy. So a row half written, overwritten while it was read, or damaged is a miss,
without locks.

Source: AutoCache, PipeTransformer section 3.4, keeps a dictionary of files in shared memory. Ours
is one file of fixed slots, written in place, whose size is reserved when it is created.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from autocache.layout import ALIGN_BYTES, RowField, RowLayout, round_up

_LOGGER = logging.getLogger(__name__)
_WORD_BYTES = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class RowRead:
    """Hold what one read found.

    Attributes:
        depth: (B,) int64; 0 for a miss, else 1 + the index into the stamps asked for.
        rows: by field name, (B, *shape) in the stored dtype; undefined where depth is 0.
    """

    depth: Tensor
    rows: dict[str, Tensor]


@dataclass
class StoreCounts:
    """Count what one process did with its store since it was opened, in rows and bytes."""

    hits: int = 0
    misses: int = 0
    corrupt_rows: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class NamelessFilesError(OSError):
    """Say that files without a name cannot be made here; others can."""


class RowStore:
    """Read and write rows by sample id; made by `create` in one process and `open` in others.

    A context manager. Every process closes its own; the file can be opened until the creator
    unlinks it or closes. Reads may run while another process writes; two processes may write at
    once.
    """

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
        self.path = path
        self.layout = layout
        self.num_rows = num_rows
        self.counts = StoreCounts()
        self._unlink = unlink
        self._header = np.frombuffer(mapping, np.uint64, count=2)
        self._tags = np.frombuffer(
            mapping, np.uint64, count=2 * num_rows, offset=ALIGN_BYTES
        ).reshape(num_rows, 2)
        row_words = layout.row_bytes // _WORD_BYTES
        table = torch.frombuffer(
            mapping,
            dtype=torch.int64,
            count=num_rows * row_words,
            offset=_rows_start(num_rows),
        ).view(num_rows, row_words)
        self._words = [
            table.narrow(1, offset // _WORD_BYTES, _num_words(field))
            for field, offset in zip(layout.fields, layout.offsets, strict=False)
        ]

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
        with open(path, "xb+") as file:
            try:
                mapping = _reserve(file.fileno(), path, layout, num_rows)
            except BaseException:
                path.unlink()
                raise
        unlink = partial(path.unlink, missing_ok=True)
        return cls(path, layout, num_rows, mapping=mapping, unlink=unlink)

    @classmethod
    def in_memory(cls, layout: RowLayout, num_rows: int) -> RowStore:
        """Make a store that no other process can open, on no file system."""
        mapping = mmap.mmap(-1, _file_bytes(layout, num_rows))
        return cls(Path("memory"), layout, num_rows, mapping=mapping)

    @classmethod
    def create_nameless(cls, folder: Path, layout: RowLayout, num_rows: int) -> RowStore:
        """Create the file without a name: a kill at any moment leaves nothing behind.

        Other processes open it by `path`, which leads through this one's descriptor.

        Args:
            folder: on the file system that gives the space.
            num_rows: see `create`.
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
            mapping = _reserve(descriptor, folder, layout, num_rows)
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
            FileNotFoundError: `path` was not created yet, or is unlinked already.
            ValueError: the file was created with another layout or number of rows.
        """
        path = Path(path)
        size = _file_bytes(layout, num_rows)
        with open(path, "rb+") as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                mapping = mmap.mmap(file.fileno(), size)
                header = np.frombuffer(mapping, np.uint64, count=1)
                if header[0] == _fingerprint(layout, num_rows):
                    return cls(path, layout, num_rows, mapping=mapping)
        raise ValueError(
            f"cache file {path} of {found} bytes has another layout than the {num_rows} rows of "
            f"{layout.fields} asked for ({size} bytes); open it as it was created"
        )

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
        self._words.clear()
        self._header = np.zeros(2, np.uint64)
        self._tags = np.empty((0, 2), np.uint64)

    @property
    def is_condemned(self) -> bool:
        """Tell whether a process has found that the rows are of no use."""
        return bool(self._header[1])

    def condemn(self) -> bool:
        """Let no process of the node read a row any more; tell whether this call was the first."""
        first = not self.is_condemned
        self._header[1] = 1
        return first

    def read(self, sample_ids: Tensor, depth_stamps: Sequence[int]) -> RowRead:
        """Read the rows of a batch whose stamp is one of those given.

        Args:
            sample_ids: (B,) int64 on CPU; duplicates are fine, ids without a row are misses.
            depth_stamps: the stamps that count as hits, none of them 0.
        Raises:
            ValueError: see `write`.
        """
        ids, fits = self._slots(sample_ids)
        stamps = np.array([_checked_stamp(stamp) for stamp in depth_stamps], np.uint64)
        before = self._tags[ids, 0]
        ranks = np.arange(1, len(stamps) + 1)
        fits = fits & (not self.is_condemned)
        depth = np.max((before[:, None] == stamps) * ranks, axis=1, initial=0) * fits
        found = depth > 0
        rows, sums = self._gather(ids, found)
        checks = self._tags[ids, 1]
        after = self._tags[ids, 0]
        intact = (sums ^ before) == checks
        depth *= intact & (after == before)
        # A stamp that changed belongs to a writer at work; only an unchanged one proves damage.
        self._count_reads(depth, found & (after == before) & ~intact)
        return RowRead(torch.from_numpy(depth), rows)

    def write(self, sample_ids: Tensor, stamp: int, rows: Mapping[str, Tensor]) -> None:
        """Write the rows of a batch in place; ids without a row are left out.

        Args:
            sample_ids: (B,) int64 on CPU, each once.
            stamp: what the rows have passed through, 0 < stamp < 2**64.
            rows: every field of the layout and no other, (B, *shape), any device.
        Raises:
            ValueError: ids that are negative or not (B,) int64 on CPU, a stamp out of range, rows
                that do not match the layout, or a closed store.
        """
        ids, fits = self._slots(sample_ids)
        _checked_stamp(stamp)
        self._check_rows(rows, len(ids))
        if self.is_condemned:
            return
        kept = torch.from_numpy(fits).nonzero().flatten()
        ids = ids[fits]
        self._tags[ids, 0] = 0
        sums = self._put(
            ids, {name: row.cpu().index_select(0, kept) for name, row in rows.items()}
        )
        # The stamp enters the check, so that bytes of one stamp never pass under another.
        self._tags[ids, 1] = sums ^ np.uint64(stamp)
        self._tags[ids, 0] = stamp
        self.counts.bytes_written += len(ids) * self.layout.row_bytes

    def _slots(self, sample_ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return each id's row number, 0 where it has none, and the (B,) mask of those it has."""
        if not self._words:
            raise ValueError(f"the store of {self.path} is closed; use it inside its `with`")
        ids = _checked_ids(sample_ids)
        fits = ids < self.num_rows
        return ids * fits, fits

    def _check_rows(self, rows: Mapping[str, Tensor], num: int) -> None:
        given = {name: (tuple(row.shape), row.dtype) for name, row in rows.items()}
        fields = self.layout.fields
        wanted = {field.name: ((num, *field.shape), field.dtype) for field in fields}
        if given != wanted:
            raise ValueError(
                f"rows {given} do not match the store's {wanted}; every sample needs the same "
                "shapes and dtypes, so pad each sample to a fixed length or use no store"
            )

    def _gather(self, ids: np.ndarray, wanted: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
        """Copy rows out of the file; return them and the (B,) uint64 sums of what was copied."""
        # Unwanted rows repeat a wanted one: it is in the CPU's cache, and one call copies all.
        source = torch.from_numpy(np.where(wanted, ids, ids.max(initial=0, where=wanted)))
        sums, rows = [], {}
        for field, words in zip(self.layout.fields, self._words, strict=True):
            copied = words.index_select(0, source)
            sums.append(copied.sum(1).numpy())
            values = copied.view(field.dtype)
            if (num_values := math.prod(field.shape)) < values.shape[1]:
                values = values[:, :num_values].contiguous()
            rows[field.name] = values.view(len(ids), *field.shape)
        return rows, np.sum(sums, axis=0).view(np.uint64)

    def _put(self, ids: np.ndarray, rows: Mapping[str, Tensor]) -> np.ndarray:
        """Copy rows into the file; return the (B,) uint64 sums of what was copied."""
        sums = []
        for field, words in zip(self.layout.fields, self._words, strict=True):
            flat = rows[field.name].detach().view(len(ids), math.prod(field.shape))
            gap_bytes = words.shape[1] * _WORD_BYTES - field.num_bytes
            padded = nn.functional.pad(flat.view(torch.uint8), (0, gap_bytes)).view(torch.int64)
            sums.append(padded.sum(1).numpy())
            words.index_copy_(0, torch.from_numpy(ids), padded)
        return np.sum(sums, axis=0).view(np.uint64)

    def _count_reads(self, depth: np.ndarray, corrupt: np.ndarray) -> None:
        hits, num_corrupt = int(np.count_nonzero(depth)), int(np.count_nonzero(corrupt))
        if num_corrupt and not self.counts.corrupt_rows:
            _LOGGER.warning(
                "cache file %s: rows fail their check and are recomputed, now %d; its memory or "
                "disk is damaged (later ones are only counted)",
                self.path,
                num_corrupt,
            )
        self.counts.hits += hits
        self.counts.misses += len(depth) - hits
        self.counts.corrupt_rows += num_corrupt
        self.counts.bytes_read += hits * self.layout.row_bytes


def _num_words(field: RowField) -> int:
    return round_up(field.num_bytes, _WORD_BYTES) // _WORD_BYTES


def _rows_start(num_rows: int) -> int:
    return round_up(ALIGN_BYTES + 2 * _WORD_BYTES * num_rows, _PAGE_BYTES)


def _file_bytes(layout: RowLayout, num_rows: int) -> int:
    return _rows_start(num_rows) + num_rows * layout.row_bytes


def _fingerprint(layout: RowLayout, num_rows: int) -> np.uint64:
    digest = hashlib.blake2b(repr((layout, num_rows)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _checked_stamp(stamp: int) -> int:
    if not 0 < stamp < 2**64:
        raise ValueError(f"stamp {stamp} is out of range; give 0 < stamp < 2**64")
    return stamp


def _checked_ids(sample_ids: Tensor) -> np.ndarray:
    form = (sample_ids.dtype, sample_ids.device.type, sample_ids.dim())
    if form == (torch.int64, "cpu", 1):
        ids = sample_ids.numpy()
        if ids.min(initial=0) >= 0:
            return ids
    raise ValueError(f"sample_ids are {sample_ids}; give dataset indices, (B,) int64, CPU")


def _reserve(descriptor: int, path: Path, layout: RowLayout, num_rows: int) -> mmap.mmap:
    """Map a new file's every byte, with all rows empty."""
    if num_rows < 1:
        raise ValueError(f"a row store has {num_rows} rows; give at least 1, or use no store")
    num_bytes = _file_bytes(layout, num_rows)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapping = mmap.mmap(descriptor, num_bytes)
        np.frombuffer(mapping, np.uint64, count=1)[0] = _fingerprint(layout, num_rows)
        return mapping
    except OSError as error:
        free = os.fstatvfs(descriptor)
        raise OSError(
            error.errno,
            f"the cache needs {num_bytes} bytes at {path} and could not get them "
            f"({error.strerror}; {free.f_bavail * free.f_frsize} bytes are free); "
            "cache fewer rows, or put the file on a larger file system",
        ) from error

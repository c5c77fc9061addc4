"""Time reading samples, and reading and writing cached rows."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autocache import HIDDEN, PrefixCache, RowContent, RowField, RowLayout, RowStore
from pipetransformer.feed import Batch
from pipetransformer.measure.timing import displacer, typical_s

_ROW = RowField(HIDDEN, (1 << 14,), torch.float32)
"""A row of 64 KiB, as a few dozen tokens have it."""

_NUM_ROWS, _FETCHED = 256, 64
_TURNS = 7
_MEMORY = Path("/dev/shm")


def measure_samples(read: Callable[[Tensor], Batch], most: int) -> dict[str, float]:
    """Time reading samples, and return that under the names of `Profile`'s fields.

    Args:
        most: samples of the largest micro-batch.
    """
    one_s, most_s = (_seconds(read, torch.arange(num)) for num in (1, most))
    sample_s = max(0.0, most_s - one_s) / max(most - 1, 1)
    return {"fetch_s": max(0.0, one_s - sample_s), "read_s": sample_s}


def measure_rows(folder: str | Path, device: torch.device) -> dict[str, Any]:
    """Time the cache's rows, and return them under the names of `Profile`'s fields.

    They are read as in training: on a GPU a thread reads them ahead.

    Args:
        folder: where the cache's file is to be. A disk's own rate counts, without memory's help,
            and it is taken to write as fast as it reads.
    """
    reads_ahead = device.type == "cuda"
    with RowStore.in_memory(RowLayout((_ROW,)), _NUM_ROWS) as store:
        write_s = _write_s(store, device)
        cache = PrefixCache(
            _never,
            chunk_size=1,
            store=store,
            stamps=[1],
            device=device,
            content=RowContent((), checked=False),
        )
        with closing(cache):
            call_s, read_s = _fetch_s(cache, reads_ahead=reads_ahead)
    disk_s = disk_byte_s(Path(folder))
    return {
        "cached_fetch_s": call_s,
        "cache_bytes_per_s": 1 / (read_s + disk_s),
        "cache_write_bytes_per_s": 1 / (write_s + disk_s),
        "cache_device_bytes_per_s": 1 / _select_s(device) if reads_ahead else None,
    }


def _fetch_s(cache: PrefixCache, *, reads_ahead: bool) -> tuple[float, float]:
    """Return the seconds of fetching rows, a call and a byte."""

    def fetch(ids: Tensor) -> Batch:
        return cache.fetch(ids, _never, depth=1)

    def fetch_ahead(ids: Tensor) -> Batch:
        cache.read_ahead(ids, depth=1)
        return fetch(ids)

    order = _any_order()
    one_s = _seconds(fetch, order[:1])
    many_s = _seconds(fetch_ahead if reads_ahead else fetch, order[:_FETCHED])
    # The call's own share is small here. A difference of the two times could be mere noise.
    byte_s = many_s / (_FETCHED * _ROW.num_bytes)
    return max(0.0, one_s - byte_s * _ROW.num_bytes), byte_s


def _write_s(store: RowStore, device: torch.device) -> float:
    """Fill an empty store, and return the seconds of writing a byte."""
    num = _NUM_ROWS // (_TURNS + 1)
    hidden = torch.ones(num, *_ROW.shape, dtype=_ROW.dtype, device=device)
    # Other rows each time: the first touch of a page is part of writing it.
    parts = iter(torch.arange(_NUM_ROWS).split(num))
    seconds = typical_s(
        lambda: store.write(next(parts), 1, {HIDDEN: hidden}), repeats=_TURNS, before=displacer()
    )
    return seconds / (num * _ROW.num_bytes)


def _select_s(device: torch.device) -> float:
    """Return the seconds of reading a byte of rows that lie in a device's memory."""
    table = torch.ones(_NUM_ROWS, *_ROW.shape, dtype=_ROW.dtype, device=device)
    order = _any_order().to(device)
    seconds = typical_s(lambda: table.index_select(0, order), repeats=_TURNS, before=displacer())
    return seconds / table.nbytes


def _any_order() -> Tensor:
    return torch.randperm(_NUM_ROWS, generator=torch.Generator().manual_seed(0))


def disk_byte_s(folder: Path) -> float:
    """Return the seconds of reading a row's byte from a folder's disk, not from memory.

    It is 0 for a folder in memory, and for one that cannot be written, where no cache will be.
    """
    if sys.platform != "linux":  # Only there a file can be dropped from the page cache.
        return 0.0
    try:
        if folder.stat().st_dev == _MEMORY.stat().st_dev:
            return 0.0
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(_NUM_ROWS * _ROW.num_bytes))
            file.flush()
            os.fsync(file.fileno())
            order = _any_order()

            def forget() -> None:
                # Else the next read would come from the page cache.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

            def read() -> None:
                for row in order[:_FETCHED].tolist():
                    os.pread(file.fileno(), _ROW.num_bytes, row * _ROW.num_bytes)

            return typical_s(read, repeats=3, before=forget) / (_FETCHED * _ROW.num_bytes)
    except OSError:
        return 0.0


def _seconds(read: Callable[[Tensor], Batch], ids: Tensor) -> float:
    return typical_s(lambda: read(ids), repeats=_TURNS, before=displacer())


def _never(*_: object) -> Any:
    raise AssertionError("all rows are in the store")

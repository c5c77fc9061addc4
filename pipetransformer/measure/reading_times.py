"""Time the reading of samples, and of rows that stand for the frozen layers' activations."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autocache import HIDDEN, PrefixCache, RowContent, RowField, RowLayout, RowStore
from pipetransformer.data import Batch
from pipetransformer.measure.timing import displacer, typical_s

_ROW = RowField(HIDDEN, (1 << 14,), torch.float32)
"""A row of 64 KiB, as a few dozen tokens have it."""

_NUM_ROWS, _FETCHED = 256, 64
_MEMORY = Path("/dev/shm")


def measure_samples(read: Callable[[Tensor], Batch], most: int) -> tuple[float, float]:
    """Return the seconds of reading, a call and a sample.

    Args:
        read: reads samples.
        most: samples of the largest micro-batch.
    """
    one_s, most_s = (_seconds(read, torch.arange(num)) for num in (1, most))
    sample_s = max(0.0, most_s - one_s) / max(most - 1, 1)
    return max(0.0, one_s - sample_s), sample_s


def measure_rows(folder: str | Path) -> tuple[float, float]:
    """Return the seconds of fetching cached rows, a call and a byte.

    Args:
        folder: where the cache's file is to be. On a disk its own rate counts: what fits memory
            needs no disk.
    """
    with RowStore.in_memory(RowLayout((_ROW,)), _NUM_ROWS) as store:
        rows = torch.zeros(_NUM_ROWS, *_ROW.shape, dtype=_ROW.dtype)
        store.write(torch.arange(_NUM_ROWS), 1, {HIDDEN: rows})
        cache = PrefixCache(
            _never,
            chunk_size=1,
            store=store,
            stamps=[1],
            device=torch.device("cpu"),
            content=RowContent((), checked=False),
        )

        def fetch(ids: Tensor) -> Batch:
            return cache.fetch(ids, _never, depth=1)

        order = torch.randperm(_NUM_ROWS, generator=torch.Generator().manual_seed(0))
        one_s, many_s = (_seconds(fetch, order[:num]) for num in (1, _FETCHED))
    byte_s = many_s / (_FETCHED * _ROW.num_bytes)  # A difference of both could be mere noise.
    return max(0.0, one_s - byte_s * _ROW.num_bytes), byte_s + disk_byte_s(Path(folder))


def disk_byte_s(folder: Path) -> float:
    """Return the seconds a byte of rows that come from a folder's disk, not from memory.

    0 in memory, and where nothing can be written: no cache will be there.
    """
    if sys.platform != "linux":  # There is no way to have a file forgotten by memory.
        return 0.0
    try:
        if folder.stat().st_dev == _MEMORY.stat().st_dev:
            return 0.0
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(_NUM_ROWS * _ROW.num_bytes))
            file.flush()
            os.fsync(file.fileno())
            order = torch.randperm(_NUM_ROWS, generator=torch.Generator().manual_seed(0))

            def forget() -> None:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

            def read() -> None:
                for row in order[:_FETCHED].tolist():
                    os.pread(file.fileno(), _ROW.num_bytes, row * _ROW.num_bytes)

            return typical_s(read, repeats=3, before=forget) / (_FETCHED * _ROW.num_bytes)
    except OSError:
        return 0.0


def _seconds(read: Callable[[Tensor], Batch], ids: Tensor) -> float:
    return typical_s(lambda: read(ids), repeats=7, before=displacer())


def _never(*_: object) -> Any:
    raise AssertionError("all rows are in the store")

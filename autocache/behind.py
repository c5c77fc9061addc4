"""Write rows, and check samples, behind the step that computed them.

step     t: fetch, computes ............  t + 1: fetch, computes .....
GPU        layers ─► copy ...
thread                    └─► digests, rows of t ...      rows of t + 1

Whoever asks for a row that is still to be written is told that it is there, and waits for it where
he reads it. So nobody in this process can tell that there is a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import FurtherRows, RowRead
from autocache.store import RowStore

_MOST_WAITING = 2
"""Writes that wait: of the step whose rows the GPU still computes, and of the one before."""


@dataclass(frozen=True)
class _Writing:
    """Name rows that the thread has yet to write.

    Args:
        ids: (B,) those that have a row.
    """

    ids: Tensor
    stamp: int
    work: Future[None]

    def overlaps(self, ids: Tensor) -> bool:
        return bool(torch.isin(self.ids, ids).any())


@final
class WrittenBehind:
    """Have a thread write the rows of a store.

    One thread calls it; another one may read. What fails in the background is raised by the next
    call. On CPUs the steps need all cores, and rows are better written at once.

    Args:
        device: where activations come from.
    """

    reads_ahead = True

    def __init__(self, store: RowStore, *, device: torch.device) -> None:
        self._store, self._device = store, device
        self.layout, self.num_rows, self.num_bytes = store.layout, store.num_rows, store.num_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._waiting: tuple[_Writing, ...] = ()
        self._checks: list[Future[bool]] = []

    @property
    def is_condemned(self) -> bool:
        """Tell, once the checks are over that were begun before, whether one has failed."""
        checks, self._checks = self._checks, []
        for check in checks:
            check.result()
        return self._store.is_condemned

    def condemn(self) -> bool:
        return self._store.condemn()

    def holds(self, check: Callable[[], bool]) -> bool:
        """Begin to check; where it fails, the step that has used the row is the last that does."""
        self._checks.append(self._thread.submit(check))
        return True

    def find(self, sample_ids: Tensor, depth_stamps: Sequence[int]) -> Tensor:
        # In this order: what is written meanwhile must not be missing in both.
        waiting = self._still_waiting()
        found = self._store.find(sample_ids, depth_stamps)
        if self._store.is_condemned:
            return found
        for one in waiting:
            depth = 1 + depth_stamps.index(one.stamp) if one.stamp in depth_stamps else 0
            found = found.masked_fill(torch.isin(sample_ids, one.ids), depth)
        return found

    def read(
        self,
        sample_ids: Tensor,
        depth_stamps: Sequence[int],
        *,
        into: Mapping[str, Tensor] | None = None,
        in_background: bool = False,
    ) -> RowRead:
        for one in self._waiting:
            if one.overlaps(sample_ids):
                one.work.result()
        return self._store.read(sample_ids, depth_stamps, into=into, in_background=in_background)

    def warn_of_damage(self, read: RowRead) -> None:
        self._store.warn_of_damage(read)

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        return self._store.buffers(num, pinned=pinned)

    def clear(self, sample_ids: Tensor) -> None:
        for one in self._waiting:
            if one.overlaps(sample_ids):
                one.work.result()
        self._store.clear(sample_ids)

    def write(
        self,
        sample_ids: Tensor,
        stamp: int,
        rows: Mapping[str, Tensor],
        lengths: Tensor | None = None,
        *,
        also: FurtherRows | None = None,
    ) -> None:
        """Have rows written, which are the caller's again at once.

        Waits for the write before the last one, so that few are held in memory.
        """
        if self._store.is_condemned:
            return
        waiting = self._still_waiting()
        for one in waiting[: 1 - _MOST_WAITING]:
            one.work.result()
        own, copied = self._copied(rows)

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            self._store.write(sample_ids, stamp, own, lengths, also=also)

        ids = sample_ids[sample_ids < self.num_rows]
        self._waiting = (*waiting, _Writing(ids, stamp, self._thread.submit(write)))

    def settle(self) -> None:
        for one in self._waiting:
            one.work.exception()  # Waits, and leaves raising to the line below.
        self._still_waiting()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            self._store.close()

    def _still_waiting(self) -> tuple[_Writing, ...]:
        """Forget the writes that are over; raise if one has failed."""
        ended = [one.work for one in self._waiting if one.work.done()]
        self._waiting = tuple(one for one in self._waiting if one.work not in ended)
        for work in ended:
            work.result()
        return self._waiting

    def _copied(
        self, rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
        """Begin to copy rows into host memory; return them, and what says that they are there.

        What is on a GPU is copied there first, in a small part of the time: the layers above may
        write into what they are given while it is on its way. What is in host memory may be that
        of rows which others are soon read into.
        """
        own = {name: row.detach().clone() for name, row in rows.items()}
        there = [name for name, row in own.items() if row.device.type == "cuda"]
        if self._stream is None or not there:
            return own, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name in there:
                row = own[name]
                own[name] = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
                own[name].copy_(row, non_blocking=True)
                row.record_stream(self._stream)
            # One that blocks leaves the core to others while it waits.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return own, copied

"""Write rows, and check samples, behind the step that computed them.

step     t: fetch, computes ............  t + 1: fetch, computes .....
GPU        layers ─► copy ...
thread                    └─► digests, rows of t ...      rows of t + 1

A row that waits to be written counts as found, and whoever reads it waits for it. So nothing in
this process depends on when the thread writes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import (
    ActivationStore,
    NewRows,
    RowRead,
    Rows,
    Stamps,
    StoreProxy,
)
from autocache.row_pool import RowPool, thread_on

_MOST_WAITING = 2
"""Writes that wait: of the step whose rows the GPU still computes, and of the one before."""


@dataclass(frozen=True)
class _Writing:
    """Name rows, by (B,) ids, that the thread has yet to write."""

    ids: Tensor
    stamp: int
    work: Future[None]


@final
class WriteBehind(StoreProxy):
    """Have a thread write the rows of a store.

    One thread calls it; one other may read. An error in the background is raised by the next call.
    On CPUs a step needs all cores, so rows are better written at once. Activations come from
    `device`.
    """

    def __init__(self, within: ActivationStore, *, device: torch.device) -> None:
        super().__init__(within)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = thread_on(device, "write-behind")
        # Replaced, never changed: another thread may read it.
        self._waiting: tuple[_Writing, ...] = ()
        self._checks: list[Future[bool]] = []

    def is_condemned(self) -> bool:
        """Wait for the checks that were begun, and return whether one has failed."""
        checks, self._checks = self._checks, []
        for check in checks:
            check.result()
        return self._within.is_condemned()

    def holds(self, check: Callable[[], bool]) -> bool:
        """Begin to check; a step that used a wrong row by then is the last that does."""
        self._checks.append(self._thread.submit(check))
        return True

    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        # First what waits, then the store: a row written in between must not be missing in both.
        waiting = self._still_waiting()
        found = self._within.find(ids, stamps)
        if self._within.is_condemned():
            return found
        for writing in waiting:
            depth = 1 + stamps.index(writing.stamp) if writing.stamp in stamps else 0
            found = found.masked_fill(torch.isin(ids, writing.ids), depth)
        return found

    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        self._wait_for(ids)
        return self._within.read(ids, stamps, out=out, pool=pool)

    def clear(self, ids: Tensor) -> None:
        self._wait_for(ids)
        self._within.clear(ids)

    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        """Have rows written; the caller may change their memory at once.

        Waits for the write before the last one, so that few are held in memory.
        """
        if self._within.is_condemned():
            return
        waiting = self._still_waiting()
        for writing in waiting[: 1 - _MOST_WAITING]:
            writing.work.result()
        own, copied = self._copied(rows)

        def write() -> None:
            if copied is not None:
                copied.synchronize()
            self._within.write(ids, stamp, own, lengths)

        ids_with_row = ids[ids < self.num_rows]
        self._waiting = (*waiting, _Writing(ids_with_row, stamp, self._thread.submit(write)))

    def settle(self) -> None:
        for writing in self._waiting:
            writing.work.exception()  # Waits, and leaves raising to the line below.
        self._still_waiting()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            self._within.close()

    def _wait_for(self, ids: Tensor) -> None:
        """Wait until none of these rows is still to be written."""
        for writing in self._waiting:
            if torch.isin(writing.ids, ids).any():
                writing.work.result()

    def _still_waiting(self) -> tuple[_Writing, ...]:
        """Forget the writes that are over; raise if one has failed."""
        ended = [writing.work for writing in self._waiting if writing.work.done()]
        self._waiting = tuple(writing for writing in self._waiting if writing.work not in ended)
        for work in ended:
            work.result()
        return self._waiting

    def _copied(self, rows: NewRows) -> tuple[NewRows, torch.cuda.Event | None]:
        """Begin to copy rows into host memory; return them, and an event for when they are there.

        Rows on a GPU are first copied there, which takes a small part of the time: the layers
        above may change them in place meanwhile. Rows in host memory may lie in a read buffer,
        which is soon read into again.
        """
        given = {name: row for name, row in rows.items() if isinstance(row, Tensor)}
        own = {name: row.detach().clone() for name, row in given.items()}
        on_gpu = [name for name, row in own.items() if row.device.type == "cuda"]
        if self._stream is None or not on_gpu:
            return {**rows, **own}, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name in on_gpu:
                row = own[name]
                own[name] = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
                own[name].copy_(row, non_blocking=True)
                # Else the allocator gives the row's memory away before the copy has read it.
                row.record_stream(self._stream)
            # A blocking event leaves the core to others while the thread waits for it.
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        return {**rows, **own}, copied

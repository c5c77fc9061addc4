"""Read rows into memory that is used again and again, and ahead of the step where that helps.

step          t: fetch      computes ........  t + 1: fetch   computes ........
thread               reads t + 1                      reads t + 2

A store with a tier on a GPU has a reader for each tier. So a file's rows are read ahead, and those
on the GPU when the step asks for them:

step          t + 1: rows on the GPU, rows that were read ahead ─► in the batch's order
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, RowRead
from autocache.row_content import HIDDEN
from autocache.row_pool import RowPool, thread_on
from autocache.tiered_store import TieredStore, join_reads

_NUM_BUFFERS = 3
"""One for this read, one for the read before, whose rows are still in use, one for the next."""


@dataclass
class _Buffers:
    """Hold memory that rows are read into; `sent` is when the last ones have reached the GPU."""

    rows: dict[str, Tensor]
    sent: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _Ahead:
    row_ids: Tensor
    stamps: tuple[int, ...]
    read: Future[RowRead]


class RowReader:
    """Read rows of a store; one per process.

    Activations go to the device; on a GPU the thread sends them, on its own stream. Other fields
    stay in host memory.
    """

    def __init__(self, store: ActivationStore, *, device: torch.device) -> None:
        self._store, self._device = store, device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._buffers: deque[_Buffers] = deque(maxlen=_NUM_BUFFERS)
        self._thread: ThreadPoolExecutor | None = None
        self._pool = RowPool.for_step_on(device)
        self._ahead: _Ahead | None = None

    def read(self, row_ids: Tensor, stamps: tuple[int, ...]) -> RowRead:
        """Read rows; they are the caller's until the read after the next."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            (read,) = self._pool.results([ahead.read])
            is_asked_for = ahead.stamps == stamps and torch.equal(ahead.row_ids, row_ids)
            if is_asked_for and not self._store.is_condemned():
                self._store.warn_of_damage(read)
                return self._handed_over(read)
            self._give_back()
        buffers = self._next_buffers(len(row_ids))
        read = self._store.read(row_ids, stamps, out=buffers.rows, pool=self._pool)
        self._store.warn_of_damage(read)
        return self._handed_over(self._sent(read, buffers))

    def read_ahead(self, row_ids: Tensor, stamps: tuple[int, ...]) -> None:
        """Have a thread read what `read` will be asked for next, where that saves time."""
        if not self._store.reads_ahead:
            return
        self.forget()
        if self._thread is None:
            self._thread = thread_on(self._device, "read-ahead")
        buffers = self._next_buffers(len(row_ids))

        def read() -> RowRead:
            found = self._store.read(row_ids, stamps, out=buffers.rows, pool=self._pool)
            return self._sent(found, buffers)

        self._ahead = _Ahead(row_ids, stamps, self._thread.submit(read))

    def close(self) -> None:
        """End the threads."""
        try:
            self.forget()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=not self._pool.hangs)
                self._thread = None
            self._pool.close()

    def forget(self) -> None:
        """Drop what was read ahead."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._pool.results([ahead.read])
            self._give_back()

    def _sent(self, read: RowRead, buffers: _Buffers) -> RowRead:
        """Begin to send the activations to the device, unless they are there."""
        buffers.sent = None
        if read.rows[HIDDEN].device.type == self._device.type:
            return read
        with torch.cuda.stream(self._stream):
            read.rows[HIDDEN] = read.rows[HIDDEN].to(self._device, non_blocking=True)
        if self._stream is not None:
            buffers.sent = torch.cuda.Event()
            buffers.sent.record(self._stream)
        return read

    def _handed_over(self, read: RowRead) -> RowRead:
        """Give rows to the current stream: the GPU waits for them, the host does not."""
        sent = self._buffers[-1].sent
        if sent is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent)
            # Else the allocator may give their memory away while this stream still reads it.
            read.rows[HIDDEN].record_stream(current)
        return read

    def _give_back(self) -> None:
        """Let memory that was read into for nothing be the next to be read into."""
        self._buffers.rotate(1)

    def _next_buffers(self, num: int) -> _Buffers:
        """Return memory for `num` rows, which the read before the last no longer needs."""
        oldest = self._buffers[0] if len(self._buffers) == _NUM_BUFFERS else None
        if oldest is None or min(map(len, oldest.rows.values())) < num:
            rows = self._store.buffers(num, pinned=self._stream is not None)
            self._buffers.append(_Buffers(rows))
        else:
            self._buffers.rotate(-1)
            if oldest.sent is not None:
                # Two reads later the copy to the GPU has long ended; only to be sure.
                oldest.sent.synchronize()
        return self._buffers[-1]


@final
class TieredReader:
    """Read rows of each tier as its own `RowReader` does, and join them in the batch's order."""

    def __init__(self, store: TieredStore, *, device: torch.device) -> None:
        self._store = store
        self._readers = [RowReader(tier, device=device) for tier in store.tiers]

    def read(self, row_ids: Tensor, stamps: tuple[int, ...]) -> RowRead:
        """Read rows; they are the caller's until the read after the next."""
        parts = self._store.parts(row_ids)
        reads = [self._readers[part.tier].read(part.ids, stamps) for part in parts]
        return join_reads(parts, reads)

    def read_ahead(self, row_ids: Tensor, stamps: tuple[int, ...]) -> None:
        """Have each tier's thread read what `read` will be asked for next."""
        for part in self._store.parts(row_ids):
            self._readers[part.tier].read_ahead(part.ids, stamps)

    def forget(self) -> None:
        """Drop what was read ahead."""
        for reader in self._readers:
            reader.forget()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def reader_of(store: ActivationStore, *, device: torch.device) -> RowReader | TieredReader:
    """Return what reads a store's rows."""
    if isinstance(store, TieredStore) and store.has_device:
        return TieredReader(store, device=device)
    return RowReader(store, device=device)

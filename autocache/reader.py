"""Read rows into memory that is used again and again, ahead of the step if need be.

step          t: fetch      computes ........  t + 1: fetch   computes ........
thread               reads t + 1                      reads t + 2

On a GPU the thread also brings the activations there, on a stream of its own.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, RowRead
from autocache.row_content import HIDDEN

_NUM_BUFFERS = 3
"""Of this read, of the one before, whose rows are still in use, and of the next."""


@dataclass
class _Buffers:
    """Hold memory that rows are read into.

    Attributes:
        sent: when what was read last has reached the GPU, or None where nothing goes there.
    """

    rows: dict[str, Tensor]
    sent: torch.cuda.Event | None = None

    @property
    def num(self) -> int:
        return min(map(len, self.rows.values()))

    def are_free(self) -> None:
        """Wait until they may be read into again: two reads later they have long been."""
        if self.sent is not None:
            self.sent.synchronize()


@dataclass(frozen=True)
class _Ahead:
    row_ids: Tensor
    stamps: tuple[int, ...]
    read: Future[RowRead]


class RowReader:
    """Read rows of a store for one process.

    Args:
        device: where the activations of what is read lie; the other fields stay in host memory,
            which is page-locked for a GPU.
    """

    def __init__(self, store: ActivationStore, *, device: torch.device) -> None:
        self._store, self._device = store, device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._buffers: deque[_Buffers] = deque(maxlen=_NUM_BUFFERS)
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: _Ahead | None = None

    def read(self, row_ids: Tensor, stamps: tuple[int, ...]) -> RowRead:
        """Read rows, as `RowStore.read`; they are the caller's until the read after the next."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            read = ahead.read.result()
            is_asked_for = ahead.stamps == stamps and torch.equal(ahead.row_ids, row_ids)
            if is_asked_for and not self._store.is_condemned:
                self._store.warn_of_damage(read)
                return self._handed_over(read)
            self._give_back()
        into = self._next_buffers(len(row_ids))
        read = self._store.read(row_ids, stamps, into=into.rows)
        return self._handed_over(self._brought(read, into))

    def read_ahead(self, row_ids: Tensor, stamps: tuple[int, ...]) -> None:
        """Have a thread read what `read` will be asked for next, where that saves time."""
        if not self._store.reads_ahead:
            return
        self.forget()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        into = self._next_buffers(len(row_ids))
        read = self._thread.submit(self._read_in_background, row_ids, stamps, into)
        self._ahead = _Ahead(row_ids, stamps, read)

    def close(self) -> None:
        self.forget()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def forget(self) -> None:
        """Drop what was read ahead."""
        if self._ahead is not None:
            self._ahead.read.result()
            self._ahead = None
            self._give_back()

    def _read_in_background(
        self, row_ids: Tensor, stamps: tuple[int, ...], into: _Buffers
    ) -> RowRead:
        read = self._store.read(row_ids, stamps, into=into.rows, in_background=True)
        return self._brought(read, into)

    def _brought(self, read: RowRead, buffers: _Buffers) -> RowRead:
        """Begin to bring the activations to the device, unless they are there."""
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
        """Give rows to the current stream: the GPU waits for them, and the host for nothing."""
        sent = self._buffers[-1].sent
        if sent is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent)
            # Else their memory would be another's too early.
            read.rows[HIDDEN].record_stream(current)
        return read

    def _give_back(self) -> None:
        """Let what was read ahead in vain be the next to be read into."""
        self._buffers.rotate(1)

    def _next_buffers(self, num: int) -> _Buffers:
        """Return memory for so many rows, which the read before the last no longer needs."""
        if len(self._buffers) < _NUM_BUFFERS or self._buffers[0].num < num:
            rows = self._store.buffers(num, pinned=self._stream is not None)
            self._buffers.append(_Buffers(rows))
        else:
            self._buffers.rotate(-1)
            self._buffers[-1].are_free()
        return self._buffers[-1]

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

from autocache.row_content import HIDDEN
from autocache.store import RowRead, RowStore

_NUM_BUFFERS = 3
"""Of this read, of the one before, whose rows are still in use, and of the next."""


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

    def __init__(self, store: RowStore, *, device: torch.device) -> None:
        self._store, self._device = store, device
        on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._buffers: deque[dict[str, Tensor]] = deque(maxlen=_NUM_BUFFERS)
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
        return self._handed_over(self._brought(self._store.read(row_ids, stamps, into=into)))

    def read_ahead(self, row_ids: Tensor, stamps: tuple[int, ...]) -> None:
        """Have a thread read what `read` will be asked for next."""
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
        self, row_ids: Tensor, stamps: tuple[int, ...], into: dict[str, Tensor]
    ) -> RowRead:
        return self._brought(self._store.read(row_ids, stamps, into=into, in_background=True))

    def _brought(self, read: RowRead) -> RowRead:
        """Bring the activations to the device; the buffers may be read into again after it."""
        with torch.cuda.stream(self._stream):
            read.rows[HIDDEN] = read.rows[HIDDEN].to(self._device, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()  # Only this thread waits, and for the copy alone.
        return read

    def _handed_over(self, read: RowRead) -> RowRead:
        if self._stream is not None:  # Whose memory it would be again too early.
            read.rows[HIDDEN].record_stream(torch.cuda.current_stream(self._device))
        return read

    def _give_back(self) -> None:
        """Let what was read ahead in vain be the next to be read into."""
        self._buffers.rotate(1)

    def _next_buffers(self, num: int) -> dict[str, Tensor]:
        """Return memory for so many rows, which the read before the last no longer needs."""
        full = len(self._buffers) == _NUM_BUFFERS
        if not full or min(map(len, self._buffers[0].values())) < num:
            self._buffers.append(self._store.buffers(num, pinned=self._stream is not None))
        else:
            self._buffers.rotate(-1)
        return self._buffers[-1]

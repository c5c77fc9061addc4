"""Copy a batch's rows on several threads at once; each has a share of them.

step       computes ..............
thread 0   rows  0 .. 15  ┐
thread 1   rows 16 .. 31  ├─► to the GPU
thread 2   rows 32 .. 47  ┘

One thread copies and sums rows at less than half of what memory gives. On CPUs the step needs all
cores, so one thread reads beside it. Beside a GPU it is half of the cores, up to four.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar, final

import torch

_MOST_THREADS = 4
_LEAST_BYTES = 1 << 20
"""Of a share: fewer are copied faster than a thread hands them over."""
MOST_WAIT_S = 600.0
"""For rows: a disk that takes longer is not there any more."""

_T = TypeVar("_T")


@final
class RowPool:
    """Have the calling thread and some others work; the others live until `close`.

    One thread calls it at a time.

    Attributes:
        hangs: whether a thread was waited for in vain.
    """

    def __init__(self, num: int) -> None:
        self._num, self.hangs = num, False
        self._others: ThreadPoolExecutor | None = None

    @classmethod
    def for_step_on(cls, device: torch.device) -> RowPool:
        """Return as many threads as help beside a step on a device."""
        if device.type != "cuda":
            return cls(1)
        is_linux = sys.platform == "linux"
        num_cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
        return cls(max(1, min(_MOST_THREADS, num_cores // 2)))

    def each(self, work: Callable[[slice], None], num: int, *, num_bytes: int) -> None:
        """Have each thread work on its share of `num` rows, and wait for all.

        Raises:
            TimeoutError: a thread has not ended.
        """
        shares = max(1, min(self._num, num, num_bytes // _LEAST_BYTES))
        if shares == 1:
            work(slice(0, num))
            return
        bounds = [num * share // shares for share in range(shares + 1)]
        own, *parts = (slice(*ends) for ends in pairwise(bounds))
        if self._others is None:
            self._others = ThreadPoolExecutor(self._num - 1, thread_name_prefix="read-rows")
        others = [self._others.submit(work, part) for part in parts]
        try:
            work(own)
        finally:  # Until all have ended they write into memory that is the caller's.
            self.results(others)

    def results(self, futures: Sequence[Future[_T]]) -> list[_T]:
        """Wait for threads that read rows; raise the first one's error once all have ended.

        Raises:
            TimeoutError: one has not ended.
        """
        if wait(futures, timeout=MOST_WAIT_S).not_done:
            self.hangs = True
            raise TimeoutError(
                f"rows of the cache were not read within {MOST_WAIT_S:.0f} s; look whether the "
                "disk of the cache's folder still answers, or choose another folder"
            )
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads, but for one that hangs."""
        if self._others is not None:
            self._others.shutdown(wait=not self.hangs)
            self._others = None


def thread_on(device: torch.device, name: str) -> ThreadPoolExecutor:
    """Return one thread whose current GPU is `device`, if that is one."""
    if device.type != "cuda":
        return ThreadPoolExecutor(1, thread_name_prefix=name)
    # A new thread's device is 0: its waits and copies would build a context there for every rank.
    index = torch.cuda.current_device() if device.index is None else device.index
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.cuda.set_device, initargs=(index,)
    )

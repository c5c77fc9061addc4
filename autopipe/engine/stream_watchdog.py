"""Limit the time of waits that a GPU's stream was given, and that block no thread of the host.

Over NCCL a wait orders the stream, and the host goes on launching::

    host      recv 0  F 0  recv 1  F 1  recv 2 | settle                  | the step's end
    stream       recv 0 . . . F 0 F 0 F 0  recv 1 . . . F 1 F 1 F 1  ...
    watchdog     ^ is the oldest wait over?     limit passed: log it, and abort the groups

A wait's time begins when the wait before it is over, since the host may launch it a step ahead.
After an abort the stream goes on with whatever is in memory. So no number may leave the process,
or become a weight, before `settle` has returned. One thread looks, from the first wait on until
the watchdog is gone: a new one for each step would cost each step its start.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

_LOGGER = logging.getLogger(__name__)

_PERIOD_S = 0.1  # Between two looks; a time limit is exceeded by at most this.


@final
class Milestone:
    """Mark what the current CUDA stream was given so far; any thread may ask about it."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._event = torch.cuda.current_stream().record_event()

    def is_reached(self) -> bool:
        """Return, without waiting, whether the device has got there."""
        # A new thread's device is 0: without this, the call would build a context there.
        with torch.cuda.device(self._device):
            return self._event.query()

    def wait(self) -> None:
        """Wait until the device has got there."""
        with torch.cuda.device(self._device):
            self._event.synchronize()


@dataclass(frozen=True)
class _Wait:
    end: Milestone
    what: str
    limit_s: float


@final
class Watchdog:
    """Watch the waits of one stream; `watch`, `check` and `settle` are for the main thread.

    Args:
        abort: ends everything under way on the links; called once, from another thread.
        error: raised if a wait has lasted too long.
    """

    def __init__(
        self,
        abort: Callable[[], None],
        *,
        error: type[RuntimeError] = RuntimeError,
        mark: Callable[[], Milestone] = Milestone,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._abort, self._error, self._mark, self._clock = abort, error, mark, clock
        self._lock = threading.Lock()
        self._waits: deque[_Wait] = deque()
        self._oldest_since_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def watch(self, what: str, limit_s: float) -> None:
        """Watch the stream's newest wait; `what` is a text such as "rank 1 waited for ..."."""
        self.check()
        wait = _Wait(self._mark(), what, limit_s)
        with self._lock:
            if not self._waits:
                self._oldest_since_s = self._clock()
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_look_always,
                    args=(weakref.ref(self),),
                    name="link watchdog",
                    daemon=True,
                )
                self._thread.start()

    def check(self) -> None:
        """Raise the error if a wait has lasted too long."""
        if self._failure is not None:
            raise self._error(self._failure)

    def settle(self) -> None:
        """Wait until all waits are over, and check: only then has everything arrived."""
        with self._lock:
            last = self._waits[-1] if self._waits else None
        if last is not None:
            last.end.wait()
        self.check()
        with self._lock:
            self._waits.clear()

    def look(self) -> None:
        """Forget the waits that are over; abort if the oldest of the others lasts too long."""
        with self._lock:
            failure = self._find_failure()
            if failure is None:
                return
            # Set before the abort lets the stream go on, so that `settle` cannot miss it.
            self._failure = failure
            self._waits.clear()
        _LOGGER.error("%s", failure)
        self._abort()

    def _find_failure(self) -> str | None:
        while self._waits:
            wait = self._waits[0]
            try:
                is_over = wait.end.is_reached()
            except RuntimeError as error:
                return f"{wait.what}: the device has failed: {error}"
            now_s = self._clock()
            if not is_over:
                if now_s - self._oldest_since_s < wait.limit_s:
                    return None
                return f"{wait.what} (limit {wait.limit_s:g} s): the links have been aborted"
            self._waits.popleft()
            self._oldest_since_s = now_s
        return None


def _look_always(watchdog: weakref.ref[Watchdog]) -> None:
    """Look again and again; a thread that held its watchdog would outlive every transition."""
    while (here := watchdog()) is not None:
        here.look()
        del here
        time.sleep(_PERIOD_S)

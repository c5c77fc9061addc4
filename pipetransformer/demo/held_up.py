"""Tell how long other programs had the core that this one could have used."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType


class HeldUp:
    """Measure how long this thread waited for a core that another program had.

    Attributes:
        share: of the seconds between entering and leaving; None where the system does not say.
    """

    share: float | None = None

    def __enter__(self) -> HeldUp:
        self._start, self._waited_s = time.perf_counter(), _waited_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        waited_s = _waited_s()
        if waited_s is not None and self._waited_s is not None:
            self.share = (waited_s - self._waited_s) / (time.perf_counter() - self._start)


def _waited_s() -> float | None:
    """Return the seconds in which this thread could have run and did not; None if not known."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None

"""Say in one line what a script was asked for wrongly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipetransformer import WorkerFailedError


class UsageError(ValueError):
    """Say what was asked for wrongly, before anything is trained."""


class RunFailedError(RuntimeError):
    """Say which run of a series failed, and where its output is."""


@contextmanager
def as_usage() -> Iterator[None]:
    """Turn what options and files raise into a UsageError."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(error) from error


def start(main: Callable[[], None]) -> None:
    """Run a script as a program: what was asked for wrongly is one line, not a traceback."""
    try:
        main()
    except (UsageError, RunFailedError, WorkerFailedError) as error:
        # What libraries say may have several lines.
        sys.exit(f"error: {' '.join(str(error).split())}")

"""Tell layers which micro-batch runs now, and whether its forward is checkpointed or repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardPass:
    """Name one forward of one micro-batch through one partition.

    Args:
        micro_batch, num_micro_batches: its index, and how many the mini-batch was split into.
        checkpointing: whether it keeps only its input, and is repeated before the backward.
        recomputing: whether this is the repetition.
    """

    micro_batch: int
    num_micro_batches: int
    checkpointing: bool = False
    recomputing: bool = False


class _Current(threading.local):
    """Hold the thread's forward; each partition runs in a thread of its own."""

    task: ForwardPass | None = None


_current = _Current()


def current_forward_pass() -> ForwardPass | None:
    """Return the forward that runs in this thread; None outside of a pipeline."""
    return _current.task


@contextmanager
def running(task: ForwardPass) -> Iterator[None]:
    """Make a forward the thread's current one."""
    before, _current.task = _current.task, task
    try:
        yield
    finally:
        _current.task = before


def is_checkpointing() -> bool:
    """Tell whether the forward that runs now will be repeated before its backward."""
    return _current.task is not None and _current.task.checkpointing


def is_recomputing() -> bool:
    """Tell whether the forward that runs now repeats an earlier one.

    A layer with a side effect asks this so as not to apply it twice:

        def forward(self, input):
            if not is_recomputing():
                self.counter += 1
            return input
    """
    return _current.task is not None and _current.task.recomputing

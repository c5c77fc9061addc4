"""Tell layers which micro-batch runs now, and whether its forward is checkpointed or repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardPass:
    """Name one forward of one micro-batch through one partition.

    A checkpointing one keeps only its input, and is repeated, recomputing, before the backward.
    """

    micro_batch: int
    num_micro_batches: int
    checkpointing: bool = False
    recomputing: bool = False


class _Current(threading.local):
    forward_pass: ForwardPass | None = None


_current = _Current()


def current_forward_pass() -> ForwardPass | None:
    """Return the forward that runs in this thread; None outside of a pipeline."""
    return _current.forward_pass


@contextmanager
def running(forward_pass: ForwardPass) -> Iterator[None]:
    before, _current.forward_pass = _current.forward_pass, forward_pass
    try:
        yield
    finally:
        _current.forward_pass = before


def is_checkpointing() -> bool:
    """Tell whether the forward that runs now will be repeated before its backward."""
    return _current.forward_pass is not None and _current.forward_pass.checkpointing


def is_recomputing() -> bool:
    """Tell whether the forward that runs now repeats an earlier one.

    A layer with a side effect asks this so as not to apply it twice:

        def forward(self, input):
            if not is_recomputing():
                self.counter += 1
            return input
    """
    return _current.forward_pass is not None and _current.forward_pass.recomputing

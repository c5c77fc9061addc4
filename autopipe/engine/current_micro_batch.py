"""Let layers ask which micro-batch runs, and whether its forward is checkpointed or repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardPass:
    """Name one forward of one micro-batch through one partition.

    Args:
        checkpointing: only the input is kept, and the forward is repeated before the backward.
        recomputing: this forward is the repetition.
    """

    micro_batch: int
    num_micro_batches: int
    checkpointing: bool = False
    recomputing: bool = False


# Partitions run as threads of one process, each with a micro-batch of its own.
class _Current(threading.local):
    forward_pass: ForwardPass | None = None


_current = _Current()


def current_forward_pass() -> ForwardPass | None:
    """Return the forward that runs in this thread; None outside a pipeline."""
    return _current.forward_pass


@contextmanager
def running(forward_pass: ForwardPass) -> Iterator[None]:
    before, _current.forward_pass = _current.forward_pass, forward_pass
    try:
        yield
    finally:
        _current.forward_pass = before


def is_checkpointing() -> bool:
    """Return whether the present forward will be repeated before its backward."""
    return _current.forward_pass is not None and _current.forward_pass.checkpointing


def is_recomputing() -> bool:
    """Return whether the present forward repeats an earlier one.

    A layer with a side effect asks, to apply it only once:

        def forward(self, input):
            if not is_recomputing():
                self.counter += 1
            return input
    """
    return _current.forward_pass is not None and _current.forward_pass.recomputing

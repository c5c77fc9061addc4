"""Watch what the steps of a plan take: live steps are the measurement."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 10
"""Steps whose median counts; fewer are too noisy, and more would notice late."""

_WARM_UP = 2
"""First steps of a plan, which touch fresh memory."""

REVIEW_STEPS = _WARM_UP + _WINDOW
"""Steps after which it is known what a plan's steps take."""


class Pace:
    """Watch the steps of one plan after the other, apart from fetching their samples.

    While a cache fills, fetching says nothing of the plan; and it takes as long under another.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    def begin(self) -> None:
        """Start to watch a plan."""
        self._num_steps = 0
        self._recent.clear()

    def note(self, seconds: float) -> bool:
        """Take a step; return whether it is known now what the plan's steps take.

        It is once for every plan.
        """
        self._num_steps += 1
        if self._num_steps > _WARM_UP:
            self._recent.append(seconds)
        return self._num_steps == REVIEW_STEPS

    @property
    def median_s(self) -> float | None:
        """Return what a step of this plan takes of late; None before there are enough of them."""
        return statistics.median(self._recent) if len(self._recent) == _WINDOW else None

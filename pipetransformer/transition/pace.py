"""Compare what steps take with what was predicted, to tell the outcome of a plan and a drift."""

from __future__ import annotations

import statistics
from collections import deque

_WINDOW = 10
"""Steps whose median counts; fewer are too noisy, and more would notice late."""

_WARM_UP = 2
"""First steps of a plan, which touch fresh memory."""

_LEAST_STAKE = 2
"""How many times what measuring anew takes must be at stake in the rest of the run."""

DRIFT = 0.25
"""Share by which steps must leave what they took for the profile to count as outdated. A plan's
prediction may be wrong by half of that, and going to another plan is no drift."""


class Pace:
    """Watch the steps of one plan after the other. On rank 0 alone.

    `usual` is what steps took at first over what the profile predicts; None before that is known.
    """

    def __init__(self) -> None:
        self._predicted_s = 0.0
        self._num_steps = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self.usual: float | None = None

    def begin(self, predicted_s: float, *, measured_anew: bool = False) -> None:
        """Start to watch a plan.

        Args:
            predicted_s: a step's seconds.
            measured_anew: whether the prediction comes from a new profile.
        """
        self._predicted_s = predicted_s
        self._num_steps = 0
        self._recent.clear()
        if measured_anew:
            self.usual = None

    def note(self, seconds: float) -> bool:
        """Take a step that filled no cache; return whether the plan's outcome is known now.

        It is once for every plan.
        """
        self._num_steps += 1
        if self._num_steps > _WARM_UP:
            self._recent.append(seconds)
        is_known = self._num_steps == _WARM_UP + _WINDOW
        if is_known and self.usual is None and self._predicted_s > 0:
            self.usual = statistics.median(self._recent) / self._predicted_s
        return is_known

    @property
    def median_s(self) -> float | None:
        """Return what a step of this plan takes of late; None before there are enough of them."""
        return statistics.median(self._recent) if len(self._recent) == _WINDOW else None

    def has_drifted_enough(self, *, remaining_steps: int, cost_s: float) -> bool:
        """Tell whether to spend so much on measuring anew: steps drifted, and many remain.

        At stake is the share of their time by which they drifted: so much another plan may save
        where steps became slower, and so much the profile misjudges others where they became
        faster.
        """
        change = self._change
        share = 1 - min(change, 1 / change)
        remaining_s = (self.median_s or 0.0) * remaining_steps
        return self.has_drifted and share * remaining_s > _LEAST_STAKE * cost_s

    @property
    def has_drifted(self) -> bool:
        """Tell whether steps have left the relation to their prediction that they had at first."""
        return not 1 / (1 + DRIFT) <= self._change <= 1 + DRIFT

    @property
    def _change(self) -> float:
        """Return what steps take over what they would if they had kept that relation."""
        median_s = self.median_s
        if median_s is None or self.usual is None or self._predicted_s <= 0:
            return 1.0
        return median_s / self._predicted_s / self.usual

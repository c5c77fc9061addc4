"""Follow a number of each step, such as the loss, between two decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final


@final
class Trend:
    """Hold the mean of an interval's values, and the slope of their least-squares line."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._count, self._times, self._squares = 0, 0.0, 0.0
        # Of any values; the name is in checkpoints.
        self._losses, self._products = 0.0, 0.0

    def add(self, value: float) -> None:
        """Note a step's value; one that is not finite is left out, as its step is skipped."""
        if not math.isfinite(value):
            return
        time = float(self._count)
        self._count += 1
        self._times += time
        self._squares += time * time
        self._losses += value
        self._products += time * value

    @property
    def mean(self) -> float | None:
        """Return the mean; None without a step."""
        return self._losses / self._count if self._count else None

    @property
    def slope(self) -> float | None:
        """Return the growth per step; None with less than two steps."""
        if self._count < 2:
            return None
        spread = self._count * self._squares - self._times**2
        return (self._count * self._products - self._times * self._losses) / spread

    def state_dict(self) -> dict[str, float]:
        """Return the unfinished interval, serialisable as JSON."""
        return {name.lstrip("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        for name, value in state.items():
            setattr(self, f"_{name}", value)

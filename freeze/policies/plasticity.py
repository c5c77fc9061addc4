"""Freeze layers whose outputs have stopped moving away from what they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from freeze.policies.arguments import grown
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class Plasticity(FreezePolicy):
    """Freeze the bottom layers whose plasticity has become flat; thaw all where the rate drops.

    A layer's plasticity is the distance of its outputs for a fixed probe batch from those at the
    start of the run: the similarity-preserving loss, or 1 - linear CKA. Its slope is that of the
    line through its last `window` values. It is flat if that is below `tolerance` times the
    layer's steepest slope so far. A value that is missing or not finite starts a window anew.

    Args:
        tolerance: share of the steepest slope, above 0.
        measure: "similarity" or "cka".
        window: decisions that a slope is fitted to, at least 2.
        thaw_drop: all layers thaw, and start anew, when the learning rate falls by this factor
            between two decisions, and by more than twice its fall before. So it does in a step
            schedule, not in a smooth decay. None never thaws.
    Raises:
        ValueError: an argument is out of its range.
    Source: Egeria (EuroSys 2023). Its reference is a quantised copy of the model, renewed while
        training, and its probe the step's own batch. Ours are the model at the start and a fixed
        batch, so plasticity grows from 0 and levels off.
    """

    _remembered = ("values", "steepest", "rates")

    def __init__(
        self,
        tolerance: float = 0.2,
        *,
        measure: str = "similarity",
        window: int = 5,
        thaw_drop: float | None = 10.0,
    ) -> None:
        measures = {"similarity": "probe_change", "cka": "probe_cka"}
        for name, value, allowed, needed in (
            ("tolerance", tolerance, tolerance > 0, "more than 0"),
            ("measure", measure, measure in measures, f"one of {sorted(measures)}"),
            ("window", window, window >= 2, "at least 2"),
            ("thaw_drop", thaw_drop, thaw_drop is None or thaw_drop > 1, "more than 1, or None"),
        ):
            if not allowed:
                raise ValueError(f"{name} is {value!r}; give {needed}")
        self._signal = measures[measure]
        self.signals = frozenset({self._signal})
        self._tolerance, self._window, self._thaw_drop = tolerance, window, thaw_drop
        self._values: list[list[float]] = []
        self._steepest: list[float] = []
        self._rates: list[float] = []

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        if not self._values:
            self._begin(context.num_layers)
        self._rates = [*self._rates, context.learning_rate][-3:]
        if context.num_frozen and self._has_dropped():
            self._begin(context.num_layers)
            _, before, rate = self._rates
            return FreezeDecision(0, f"the learning rate fell from {before:.2g} to {rate:.2g}")
        slopes = [self._slope(layer, context) for layer in range(context.num_layers)]
        num_frozen = grown(context, lambda layer: self._is_flat(layer, slopes[layer]))
        where = min(num_frozen, context.num_layers - 1)
        slope, steepest = slopes[where], self._steepest[where]
        said = "not known yet" if slope is None else f"{slope:.2g} of at most {steepest:.2g}"
        return FreezeDecision(num_frozen, f"plasticity's slope at layer {where}: {said}")

    def _has_dropped(self) -> bool:
        """Return whether the learning rate has fallen like a step, not like a smooth decay."""
        if self._thaw_drop is None or len(self._rates) < 3:
            return False
        earlier, before, rate = self._rates
        # A tenth of 2e-5, times ten, comes out as a little more than 2e-5.
        is_far = rate * self._thaw_drop <= before * (1 + 1e-9)
        return is_far and before - rate > 2 * (earlier - before)

    def _begin(self, num_layers: int) -> None:
        self._values = [[] for _ in range(num_layers)]
        self._steepest = [0.0] * num_layers

    def _slope(self, layer: int, context: FreezeContext) -> float | None:
        """Add a layer's value; return its slope per decision, None while its window is short."""
        value = getattr(context.layers[layer], self._signal)
        if value is None or not math.isfinite(value):
            self._values[layer].clear()
            return None
        own = self._values[layer] = [*self._values[layer], value][-self._window :]
        if len(own) < 2:
            return None
        slope = abs(_slope(own))
        self._steepest[layer] = max(self._steepest[layer], slope)
        return slope if len(own) == self._window else None

    def _is_flat(self, layer: int, slope: float | None) -> bool:
        """Return whether a slope is small beside the layer's steepest, which then is above 0."""
        return slope is not None and slope < self._tolerance * self._steepest[layer]


def _slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through values at 0, 1, ..."""
    middle = (len(values) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * value for i, value in enumerate(values)) / spread

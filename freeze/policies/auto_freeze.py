"""Freeze layers whose gradients have stopped changing."""

from __future__ import annotations

import math
from typing import final

import numpy as np

from freeze.policies.arguments import grown
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class AutoFreeze(FreezePolicy):
    """Freeze the bottom layers whose gradients change less than those of most active layers.

    r_l = |G_l' - G_l| / G_l', where G_l is the L1 norm of layer l's accumulated gradient since the
    last decision, and G_l' that of the interval before. The active layers below the first one with
    r_l at or above their percentile freeze. Nothing thaws. A layer whose change is not known, or
    whose gradient is zero, does not freeze and does not count in the percentile.

    Args:
        percentile: 0..100, of the active layers' changes; 50 is the median.
    Raises:
        ValueError: the percentile is out of its range.
    Source: AutoFreeze (2021), which decides 20 times a run (freeze_interval_share=0.05) and loses
        the optimizer's moments then. That the last layer stays active is ours.
    """

    signals = frozenset({"accumulated_gradient"})
    _remembered = ("before",)

    def __init__(self, percentile: float = 50.0) -> None:
        if not 0 <= percentile <= 100:
            raise ValueError(f"percentile is {percentile}; give 0..100")
        self._percentile = percentile
        self._before: list[float | None] = []

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        now = [layer.accumulated_gradient for layer in context.layers]
        before, self._before = self._before or [None] * len(now), now
        active = range(context.num_frozen, context.num_layers)
        changes = {i: r for i in active if (r := _change(before[i], now[i])) is not None}
        if not changes:
            return None
        limit = float(np.percentile(list(changes.values()), self._percentile))
        num_frozen = grown(context, lambda layer: changes.get(layer, math.inf) < limit)
        change = changes.get(num_frozen)
        said = "not measured" if change is None else f"{change:.3g}"
        text = f"gradients changed by less than {limit:.3g}; layer {num_frozen}: {said}"
        return FreezeDecision(num_frozen, text)


def _change(before: float | None, now: float | None) -> float | None:
    if not before or not now or not (math.isfinite(before) and math.isfinite(now)):
        return None
    return abs(before - now) / before

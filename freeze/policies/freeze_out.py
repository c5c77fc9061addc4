"""Freeze layer after layer at times set beforehand, each with a learning rate that ends there."""

from __future__ import annotations

import math
from typing import final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class FreezeOut(FreezePolicy):
    """Let layer i's learning rate fall to zero at t_i of the run, and freeze it then.

    t_i = (t0 + (1 - t0) i / L)^3; up to it the rate is the peak rate times
    (1 + cos(pi t / t_i)) / 2, divided by t_i if `scaled`, so that each layer gets the same sum of
    rates. The head has t = 1. The run's own learning rate schedule is not used.

    Args:
        t0: when the first layer freezes, before cubing; between 0, exclusive, and 1.
        cubed: whether times are cubed.
        scaled: whether rates are divided by t_i.
    Raises:
        ValueError: t0 is out of its range.
    Source: FreezeOut (2017), sections 2 and 3. Layers freeze at the first decision after t_i; the
        rate is zero meanwhile.
    """

    def __init__(self, t0: float = 0.8, *, cubed: bool = True, scaled: bool = True) -> None:
        if not 0 < t0 <= 1:
            raise ValueError(f"t0 is {t0}; give a share of the run, above 0 and up to 1")
        self._t0, self._power, self._scaled = t0, 3 if cubed else 1, scaled

    def decide(self, context: FreezeContext) -> FreezeDecision:
        layers, done = context.num_layers, context.step / context.max_steps
        num_frozen = sum(self.end(layer, layers) <= done for layer in range(layers))
        return FreezeDecision(num_frozen, f"at {done:.0%} of the run")

    def end(self, layer: int, num_layers: int) -> float:
        """Return the share of the run at which a layer's learning rate is zero."""
        return float((self._t0 + (1 - self._t0) * layer / num_layers) ** self._power)

    def learning_rate_scale(self, layer: int, num_layers: int, done: float) -> float:
        end = self.end(layer, num_layers)
        if done >= end:
            return 0.0
        return (1 + math.cos(math.pi * done / end)) / 2 / (end if self._scaled else 1.0)

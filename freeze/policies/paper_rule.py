"""Freeze by the published rule."""

from __future__ import annotations

import math
from typing import final

from freeze.policies.arguments import checked_alpha, rounded_up
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class PaperRule(FreezePolicy):
    """Freeze by the paper's rule: a share of the active layers, held back by the gradients.

    L_f(T) = min(L_f(T-1) + alpha * (L - L_f(T-1)), argmin_l ||g_l(T)||), L_f(0) = 0, where g_l is
    layer l's gradient and l runs over the active layers, from 0. Only layers below the one with
    the smallest gradient may freeze, so the last layer never does. Of equal gradients the lowest
    layer counts. Layers without parameters, or with gradient zero, do not count.

    Each call at step >= 1 is one decision T. Nothing thaws. If something else changed what is
    frozen, a thaw for instance, L_f starts anew from there.

    Args:
        alpha: share of the active layers that may freeze per decision, between 0 and 1, exclusive.
    Raises:
        ValueError: alpha is out of its range.
    Source: PipeTransformer section 3.1.
    """

    signals = frozenset({"gradient_norm"})
    _remembered = ("level", "num_decisions")

    def __init__(self, alpha: float) -> None:
        self._alpha = checked_alpha(alpha)
        self._level = 0.0
        self._num_decisions = 0

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        """Take decision T; None at step 0.

        Raises:
            ValueError: the gradient norm of some active layers is missing or not finite.
        """
        if context.step == 0:
            return None
        norms = _active_norms(context)
        if not norms:
            return FreezeDecision(context.num_frozen, "no active layer has a measured gradient")
        unchanged = rounded_up(self._level) == context.num_frozen
        before = self._level if unchanged else float(context.num_frozen)
        quietest = min(norms, key=norms.__getitem__)
        grown = before + self._alpha * (context.num_layers - before)
        self._level = max(before, min(grown, quietest))
        self._num_decisions += 1
        return FreezeDecision(
            rounded_up(self._level),
            f"paper's rule: L_f({self._num_decisions}) = {self._level:.3f} of at most "
            f"{grown:.3f}, smallest gradient at layer {quietest}",
        )


def _active_norms(context: FreezeContext) -> dict[int, float]:
    """Return the gradient norm of each active layer, by index; {} if none was measured."""
    active = [
        layer
        for layer in context.layers[context.num_frozen :]
        if layer.num_parameters and layer.index not in context.resting
    ]
    norms = {layer.index: layer.gradient_norm for layer in active}
    if not any(norm is not None for norm in norms.values()):
        return {}
    finite = {i: norm for i, norm in norms.items() if norm is not None and math.isfinite(norm)}
    if bad := {i: norm for i, norm in norms.items() if i not in finite}:
        raise ValueError(
            f"the paper's rule compares the gradient norms of all active layers, but at step "
            f"{context.step} those of these layers are missing or not finite: {bad}; measure all "
            "of them over the steps with finite gradients"
        )
    return {i: norm for i, norm in finite.items() if norm > 0}

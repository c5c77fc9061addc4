"""Freeze layers whose weights have almost stopped moving."""

from __future__ import annotations

import math
from typing import final

from freeze.policies.arguments import grown
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class QuietUpdates(FreezePolicy):
    """Freeze the bottom layers whose weights have become quiet; nothing thaws.

    A layer is quiet if ||w - w'|| / (k ||w'||) is below `threshold`, with w' its weights at the
    last decision, k steps ago. The change is scaled up to the peak learning rate, so that a
    warm-up or a decay does not look like convergence. A layer whose change is missing, zero or not
    finite is not quiet.

    Args:
        threshold: relative change per step.
        begin: share of the run before which nothing freezes.
    Raises:
        ValueError: an argument is out of its range.
    Source: GradES (2025), which freezes single matrices by their change in L1, not relative to
        their size. The prefix, the norm and the learning rate are ours.
    """

    signals = frozenset({"relative_update"})

    def __init__(self, threshold: float = 1e-5, *, begin: float = 0.1) -> None:
        # Written as `not >`, which refuses NaN too.
        if not threshold > 0:
            raise ValueError(f"threshold is {threshold}; give more than 0")
        if not 0 <= begin <= 1:
            raise ValueError(f"begin is {begin}; give a share of the run, 0 to 1")
        self._threshold, self._begin = threshold, begin

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        rate = context.mean_learning_rate
        rate = context.learning_rate if rate is None else rate
        if context.step / context.max_steps < self._begin or not rate > 0:
            return None
        scale = max(1.0, context.peak_learning_rate / rate)

        def is_quiet(layer: int) -> bool:
            change = context.layers[layer].relative_update
            return change is not None and 0 < change * scale < self._threshold

        num_frozen = grown(context, is_quiet)
        where = min(num_frozen, context.num_layers - 1)
        change = context.layers[where].relative_update
        said = "not measured" if change is None else f"{change * scale:.2g}"
        if change is not None and not math.isfinite(change):
            said = "not finite"
        elif where == context.num_layers - 1 and is_quiet(where):
            said += ", but stays active"
        text = f"quiet below {self._threshold:g} a step; layer {where}: {said}"
        return FreezeDecision(num_frozen, text)

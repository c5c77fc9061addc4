"""Freeze layers whose weights hardly move any more."""

from __future__ import annotations

import math
from typing import final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class QuietUpdates(FreezePolicy):
    """Freeze the bottom layers whose weights have all become quiet; a layer that froze stays so.

    A layer is quiet where ||w - w'|| / (k ||w'||), with w' its weights k steps ago, at the last
    decision, is below `threshold` at the peak learning rate: at a lower one it counts as much more
    as the rate is lower, so that a warm-up or a decay does not look like convergence. A layer
    whose change is missing, zero or not finite is not quiet.

    Args:
        threshold: relative change per step.
        begin: share of the run before which nothing freezes.
        min_active: layers that never freeze.
    Raises:
        ValueError: an argument is out of its range.
    Source: GradES (2025), which compares single matrices' change in L1, not over their size; the
        prefix, the norm and the learning rate are ours.
    """

    signals = frozenset({"relative_update"})

    def __init__(
        self, threshold: float = 1e-5, *, begin: float = 0.1, min_active: int = 1
    ) -> None:
        for name, value, allowed in (
            ("threshold", threshold, threshold > 0),
            ("begin", begin, 0 <= begin <= 1),
            ("min_active", min_active, min_active >= 0),
        ):
            if not allowed:
                raise ValueError(f"{name} is {value}; see the docstring for what is allowed")
        self._threshold, self._begin, self._min_active = threshold, begin, min_active

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        if context.step < self._begin * context.max_steps or not context.learning_rate > 0:
            return None
        scale = max(1.0, context.peak_learning_rate / context.learning_rate)
        num_frozen = context.num_frozen
        most = context.num_layers - self._min_active
        change = None
        while num_frozen < most:
            change = context.layers[num_frozen].relative_update
            if change is None or not 0 < change * scale < self._threshold:
                break
            num_frozen += 1
        said = "not measured" if change is None else f"{change * scale:.2g}"
        if change is not None and not math.isfinite(change):
            said = "not finite"
        where = min(num_frozen, context.num_layers - 1)
        text = f"quiet below {self._threshold:g} a step; layer {where}: {said}"
        return FreezeDecision(num_frozen, text)

"""Hold a policy back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from freeze.policies.arguments import checked_count, metric_sign
from freeze.policy import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    PolicyFunction,
    as_policy,
    checked_decision,
)


@final
class Guarded(FreezePolicy):
    """Hold a policy back, so that it freezes later, more slowly, or less far.

    Args:
        warmup: steps before which nothing freezes; below 1, a share of the run.
        patience: decisions in a row in which the policy must want more than is frozen. Then the
            least of what it wanted freezes. A thaw does not wait.
        at_once: most layers that freeze at one decision; None sets no limit. With `patience` this
            paces a policy: a further layer only after `patience` decisions.
        min_active: layers that never freeze.
        thaw_on: a metric's name. When it is worse than its best by more than `tolerance`, the
            layers that froze since that best thaw, and patience starts anew.
        tolerance: in the metric's own unit.
        greater_is_better: None: yes, unless the metric's name ends in "loss".
    Raises:
        TypeError: a number of layers or of decisions is not an int.
        ValueError: an argument is out of its range; later, an evaluation lacks the metric.
    """

    _remembered = ("wanted", "best", "frozen_at_best", "seen")

    # Each argument is one independent bound.
    def __init__(  # noqa: PLR0913
        self,
        policy: FreezePolicy | PolicyFunction,
        *,
        warmup: float = 0,
        patience: int = 1,
        at_once: int | None = None,
        min_active: int = 1,
        thaw_on: str | None = None,
        tolerance: float = 0.0,
        greater_is_better: bool | None = None,
    ) -> None:
        for name, value, least in (
            ("warmup", warmup, 0),
            ("patience", checked_count("patience", patience), 1),
            ("at_once", 1 if at_once is None else checked_count("at_once", at_once), 1),
            ("tolerance", tolerance, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} is {value}; give at least {least}")
        self._policy = as_policy(policy)
        self.signals, self.interval_share = self._policy.signals, self._policy.interval_share
        self._warmup, self._patience = warmup, patience
        self._min_active = checked_count("min_active", min_active)
        self._at_once = at_once
        self._thaw_on, self._tolerance = thaw_on, tolerance
        self._sign = metric_sign(thaw_on or "", greater_is_better)
        self._wanted: list[int] = []
        self._best: float | None = None
        self._frozen_at_best = 0
        self._seen: list[float | int | None] = []

    @property
    def name(self) -> str:
        return f"Guarded({self._policy.name})"

    def check(self, num_layers: int) -> None:
        self._policy.check(num_layers)

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self._policy.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state.items() if name != "policy"})
        self._policy.load_state_dict(state["policy"])

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        # Asked at every decision, even in the warm-up, as a policy may remember what it saw.
        wanted = checked_decision(self._policy, context)
        if regressed := self._regressed(context):
            self._wanted.clear()
            return FreezeDecision(min(self._frozen_at_best, context.num_frozen), regressed)
        # A share is compared with a share: 0.55 * 20 steps would be a little more than 11.
        whole = context.max_steps if 0 < self._warmup < 1 else 1
        if context.step / whole < self._warmup:
            return FreezeDecision(0, f"warm-up until step {self._warmup * whole:g}")
        most = max(0, context.num_layers - self._min_active)
        num_frozen = min(wanted.num_frozen, most)
        if num_frozen > context.num_frozen:
            self._wanted.append(num_frozen)
            if len(self._wanted) < self._patience:
                text = f"waiting, {len(self._wanted)} of {self._patience}: {wanted.reason}"
                return FreezeDecision(context.num_frozen, text, context.resting)
            num_frozen = min(self._wanted)
            if self._at_once is not None:
                num_frozen = min(num_frozen, context.num_frozen + self._at_once)
        self._wanted.clear()
        resting = tuple(i for i in wanted.resting if i > num_frozen)
        return FreezeDecision(num_frozen, wanted.reason, resting)

    def _regressed(self, context: FreezeContext) -> str | None:
        """Return why to thaw, if a new evaluation is worse, else None; remember the best."""
        if self._thaw_on is None or not context.metrics:
            return None
        if self._thaw_on not in context.metrics:
            raise ValueError(
                f"thaw_on is {self._thaw_on!r}, but an evaluation has {sorted(context.metrics)}"
            )
        value = context.metrics[self._thaw_on]
        # Several decisions see the same evaluation; it counts once.
        evaluation = [context.evaluated_at, value]
        if evaluation == self._seen:
            return None
        gain = -math.inf  # NaN is worse than any number.
        if math.isfinite(value):
            self._seen = evaluation
            gain = math.inf if self._best is None else self._sign * (value - self._best)
        if gain >= 0:
            self._best, self._frozen_at_best = value, context.num_frozen
        if gain >= -self._tolerance or context.num_frozen <= self._frozen_at_best:
            return None
        return f"{self._thaw_on} fell back from {self._best} to {value}"

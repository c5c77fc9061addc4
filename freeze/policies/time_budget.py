"""Freeze as late as a budget of time allows, and then all that may freeze at once.

share of the unfrozen run's time   1.0   0.7   0.5   0.3
steps with nothing frozen          all   60 %  36 %  12 %     10 of 12 equal layers freeze,
                                                              8 epochs, cached
"""

from __future__ import annotations

from typing import final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class TimeBudget(FreezePolicy):
    """Train all layers at first, and freeze in time for the run to end within a budget.

    The budget is a share of what the run would take with nothing frozen. Times are those that
    `FreezeContext.predict` gives: of the Trainer's planner, or of an observer's first steps. What
    evaluations take is not in them.

    Args:
        share: of the unfrozen run's seconds, above 0 and up to 1.
        active: share of the layers that never freeze; at least one layer.
    Raises:
        ValueError: an argument is out of its range.
    Source: ours; `experiments/results/when_it_pays` has what it was compared with.
    """

    interval_share = 0.02  # It misses a budget by what it is asked too late.

    def __init__(self, share: float = 0.5, *, active: float = 1 / 6) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; give a share of the time, above 0 and up to 1")
        if not 0 < active <= 1:
            raise ValueError(f"active is {active}; give a share of the layers, above 0, up to 1")
        self._share, self._active = share, active

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        deepest = context.num_layers - max(1, round(self._active * context.num_layers))
        if self._share == 1 or not deepest or context.num_frozen >= deepest or not context.step:
            return None
        begin, reachable = self._begin(context, deepest)
        if context.step < begin:
            return FreezeDecision(context.num_frozen, f"all train up to step {begin:.0f}")
        missed = "" if begin >= 0 else f"; {reachable:.2f} is the least that this can reach"
        return FreezeDecision(deepest, f"for {self._share:g} of the unfrozen time{missed}")

    def _begin(self, context: FreezeContext, deepest: int) -> tuple[float, float]:
        """Return the step to freeze at, and the smallest share that freezing at once would take.

        With steps of a seconds before and b after, n in all, and a fill of f seconds, a share s
        of n * a seconds is kept by freezing at step (s n a - n b - f) / (a - b).
        """
        before, after = context.predict(0), context.predict(deepest)
        saved, steps = before - after, context.max_steps
        if saved <= 0:
            return float(steps), 1.0
        # Each sample passes the frozen layers once more, forward only: a third of their step.
        fill = saved / 3 * context.steps_per_epoch
        whole = steps * before
        return (self._share * whole - steps * after - fill) / saved, (steps * after + fill) / whole

"""Explain a plan: where its step's time goes, what each stage does, and what else was possible.

A step's time is the sum of its parts. Compute is a stage's mean work, and recompute what it does
again. Bubble is its mean wait for others' work. Reading is stage 0's wait for rows that are read
ahead, and is split off first. Each other part is the time that the step would save if the part
cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopipe.plan.request import PipelinePlan, PlanRequest
from autopipe.plan.search import simulate_plan, step_s
from autopipe.plan.simulation import Simulation
from autopipe.profile import LinkCost, Profile, RingCost
from autopipe.trace import Span

_NO_LINK = LinkCost(0.0, float("inf"))


@dataclass(frozen=True)
class StepParts:
    compute_s: float
    bubble_s: float
    transfer_s: float
    all_reduce_s: float
    update_s: float
    overhead_s: float
    reading_s: float = 0.0
    recompute_s: float = 0.0


@dataclass(frozen=True)
class ExplainedPlan:
    """Hold a plan with its step's parts and its simulated schedule.

    Args:
        simulation: of each worker, without sums of gradients and update, which come after it.
        workers: of each stage.
    """

    plan: PipelinePlan
    parts: StepParts
    simulation: Simulation
    workers: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, without the timeline."""
        return {
            **self.plan.to_json(),
            **asdict(self.parts),
            "workers": self.workers,
            "busy_s": self.simulation.busy_s,
            "idle_s": self.simulation.idle_s,
        }

    def spans(self) -> list[Span]:
        """Return the schedule as spans to draw, each with all of its stage's peak bytes."""
        peaks = [
            size
            for size, count in zip(self.plan.peak_bytes, self.workers, strict=True)
            for _ in range(count)
        ]
        return [
            replace(span, kept_bytes=peaks[span.stage], peak_bytes=peaks[span.stage])
            for span in self.simulation.timeline
        ]


def explain(profile: Profile, request: PlanRequest, plan: PipelinePlan) -> ExplainedPlan:
    whole = plan
    if request.prefix_read_ahead and request.prefix_cached_s is not None:
        request = replace(request, prefix_cached_s=0.0)
        plan = replace(plan, predicted_step_s=step_s(profile, request, plan))
    # Each part comes from pricing the plan once more on a profile where the part is free.
    unsummed = replace(profile, all_reduce=RingCost(_NO_LINK, _NO_LINK))
    simulation = simulate_plan(profile, request, plan)
    unlinked_profile = replace(profile, link=_NO_LINK, node_link=_NO_LINK)
    unlinked = simulate_plan(unlinked_profile, request, plan)
    busy_s = _mean(unlinked.busy_s)
    once = replace(plan, recomputes=False)
    compute_s = busy_s
    if plan.recomputes:
        compute_s = _mean(simulate_plan(unlinked_profile, request, once).busy_s)
    parts = StepParts(
        compute_s=compute_s,
        bubble_s=unlinked.step_s - busy_s,
        transfer_s=simulation.step_s - unlinked.step_s,
        all_reduce_s=_saved_s(unsummed, request, plan),
        update_s=_saved_s(replace(profile, optimizer_s_per_byte=0.0), request, plan),
        overhead_s=_saved_s(replace(profile, step_overhead_s=0.0), request, plan),
        reading_s=whole.predicted_step_s - plan.predicted_step_s,
        recompute_s=busy_s - compute_s,
    )
    return ExplainedPlan(whole, parts, simulation, request.workers_of(plan.length))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _saved_s(cheaper: Profile, request: PlanRequest, plan: PipelinePlan) -> float:
    """Return how much shorter the plan's step is on a cheaper profile."""
    return plan.predicted_step_s - step_s(cheaper, request, plan)


def runners_up(plans: Sequence[PipelinePlan], chosen: PipelinePlan) -> list[PipelinePlan]:
    """Select the fastest plan of each other length, and the three next fastest of all.

    `plans` are all that fit, fastest first; the chosen one is left out.
    """
    # Of plans that differ only by their schedule, the fastest stays.
    by_shape = {(plan.length, plan.num_micro_batches): plan for plan in reversed(plans)}
    by_shape.pop((chosen.length, chosen.num_micro_batches), None)
    different = sorted(by_shape.values(), key=_rank)
    fastest = {plan.length: plan for plan in reversed(different) if plan.length != chosen.length}
    best = [*fastest.values()]
    others = [plan for plan in different if plan not in best][:3]
    return sorted(best + others, key=_rank)


def _rank(plan: PipelinePlan) -> tuple[float, int, int]:
    """Order by time, then by length and micro-batches."""
    # Nine digits: times that differ only by rounding count as equal.
    return float(f"{plan.predicted_step_s:.9g}"), plan.length, plan.num_micro_batches


def confidence(
    range_s: tuple[float, float],
    near: Sequence[PipelinePlan],
    taken: PipelinePlan,
    *,
    current: PipelinePlan | None = None,
) -> str:
    """Say in a line how far a plan's step time is known, and which plans are as good.

    Args:
        range_s: the taken plan's `step_range`; "" is returned where nothing was timed repeatedly.
        near: from `near_fastest`, if the plan was chosen by it.
        current: the plan before the taken one.
    """
    low_s, high_s = range_s
    if low_s == high_s:
        return ""
    text = f"a step takes {_ms(low_s)} to {_ms(high_s)} by the quartiles of what was measured"
    if len(near) < 2 or taken.length not in {plan.length for plan in near}:
        return text
    *names, last = (
        f"K = {plan.length}, M = {plan.num_micro_batches} ({_ms(plan.predicted_step_s)})"
        for plan in near
    )
    if current is not None and taken.length == current.length:
        rule = "stays, as going costs time"
    elif taken.length == near[0].length:
        rule = "is taken, the shortest pipeline"
    else:
        rule = "is taken, which saves more until the end than going there costs"
    alike = f"{', '.join(names)} and {last} cannot be told apart"
    return f"{text}; {alike}: K = {taken.length} {rule}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds * 1e3:.0f} ms"

"""Choose a pipeline: by the fastest step, by the published rules, or as PipeDream does.

A planner is a function of a `PlanSituation`: one of ours by name, or a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from autodp import ROUND_BYTES
from autopipe.pipedream import plan_as_pipedream
from autopipe.plan import (
    PipelinePlan,
    PlanRequest,
    plan_as_published,
    plan_pipeline,
    predict,
    published_length,
)
from autopipe.profile import Profile


@dataclass(frozen=True)
class PlanSituation:
    """State what a planner may look at.

    Args:
        step: the first step the plan is for.
        remaining_steps: steps to the end of the run.
        profile: measured costs.
        request: the cluster, the batch of a pipeline or of the world, what is frozen, and the
            limits.
        current: the plan so far; None at the start.
        transition_s: returns the seconds that going from the current plan to another will cost.
        scale_batch: whether the request's batch is a pipeline's and grows with the replicas.
        correction: returns how many times longer than predicted a plan's steps have turned out to
            take; 1 where that is not known.
    """

    step: int
    remaining_steps: int
    profile: Profile
    request: PlanRequest
    current: PipelinePlan | None
    transition_s: Callable[[PipelinePlan], float]
    scale_batch: bool = False
    correction: Callable[[PipelinePlan], float] = lambda plan: 1.0


Planner = Callable[[PlanSituation], PipelinePlan]


@dataclass(frozen=True)
class RowRates:
    """State how fast rows of the cache are read and written, where they lie.

    Args:
        read_bytes_per_s: from there to the device that trains.
        write_bytes_per_s: the other way.
        reads_ahead: whether they are read while the step before computes, and take nothing from
            it.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    reads_ahead: bool = False


def complete_request(
    request: PlanRequest,
    profile: Profile,
    *,
    rows: RowRates | None,
    reads_a_row: float = math.inf,
) -> PlanRequest:
    """Add to a request what follows from the costs: the prefix's reading, a transition's round.

    Args:
        request: states the prefix's chunk.
        rows: how cached activations are read and written; None without a cache. The prefix is
            cached if reading saves more until the end than writing takes.
        reads_a_row: how often a written row will be read.
    """
    cached_s = None
    if rows is not None and profile.first_active(request.num_frozen):
        chunk = request.prefix_chunk or 1
        num_bytes = profile.prefix_bytes(request.num_frozen)
        read_s, write_s = num_bytes / rows.read_bytes_per_s, num_bytes / rows.write_bytes_per_s
        hidden_s = _least_active_s(request, profile) if rows.reads_ahead else 0.0
        computed_s = profile.prefix_s(request.num_frozen, chunk) / chunk
        saved_s = computed_s - max(0.0, read_s - hidden_s)
        if saved_s > 0 and reads_a_row * saved_s > write_s:
            cached_s = read_s
    return replace(
        request,
        prefix_cached_s=cached_s,
        prefix_read_ahead=cached_s is not None and rows is not None and rows.reads_ahead,
        round_bytes=ROUND_BYTES if request.num_ranks > 1 else 0,
    )


def _least_active_s(request: PlanRequest, profile: Profile) -> float:
    """Return a stage's mean seconds a sample in the longest pipeline that is allowed.

    It bounds the time a sample of every plan from below, as the slowest stage takes no less.
    """
    chunk = request.prefix_chunk or 1
    active = range(profile.first_active(request.num_frozen), len(profile.sublayers))
    active_s = sum(profile.forward_s(i, chunk) + profile.backward_s(i, chunk) for i in active)
    longest = max(chain.from_iterable(request.length_choices()))
    return active_s / chunk / max(1, min(longest, len(active)))


def sureness(
    range_s: tuple[float, float],
    near: Sequence[PipelinePlan],
    taken: PipelinePlan,
    *,
    current: PipelinePlan | None = None,
) -> str:
    """Say how far a plan's step time is known, and which plans are as good.

    Returns:
        one line; "" where nothing was timed repeatedly.

    Args:
        range_s: the taken plan's `step_range`.
        near: from `near_fastest`, if the plan was chosen by it.
        taken: the chosen plan.
        current: the plan before it.
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


def fastest_plan(situation: PlanSituation) -> PipelinePlan:
    """Return the plan with which the rest of the run takes least time, a transition included.

    Another plan must save more until the end than the transition costs, and more than noise in the
    measurements can fake. At the start, and if the current stages no longer fit, the fastest plan
    wins.

    Raises:
        ValueError: nothing fits the memory limit.
    """
    plans, current = fastest_by_length(situation), situation.current
    if current is None or current.length not in plans:
        return fastest_per_sample(situation)
    # A single stage stays what it is with any number of micro-batches, so take the best.
    stay = plans[1] if current.length == 1 else _stay(situation, current)

    def remaining_s(plan: PipelinePlan) -> float:
        # Steps are counted at the current batch; with scale_batch another plan's batch differs.
        share = _growth(situation, current.length) / _growth(situation, plan.length)
        stays = stay is not None and plan.boundaries == stay.boundaries
        going_s = 0.0 if stays else situation.transition_s(plan)
        return plan.predicted_step_s * share * situation.remaining_steps + going_s

    left_s = {length: remaining_s(plan) for length, plan in plans.items()}
    best = plans[min(left_s, key=left_s.__getitem__)]
    noise = 2 * situation.profile.uncertainty
    if stay is None or left_s[best.length] * (1 + noise) < remaining_s(stay):
        return best
    return stay


def _stay(situation: PlanSituation, current: PipelinePlan) -> PipelinePlan | None:
    """Predict the current stages, recomputed only where they must be; None if they do not fit."""
    ways = (replace(current, recomputes=one) for one in situation.request.recompute)
    return next((plan for way in ways if (plan := same_stages(situation, way))), None)


def same_stages(situation: PlanSituation, current: PipelinePlan) -> PipelinePlan | None:
    """Predict the current stages without the frozen layers; None if they no longer fit."""
    request, profile = of_length(situation, current.length), situation.profile
    first_active = profile.first_active(request.num_frozen)
    boundaries = (first_active, *current.boundaries[1:])
    if first_active >= boundaries[1]:
        return None
    plan = predict(
        profile,
        request,
        boundaries=boundaries,
        num_micro_batches=min(current.num_micro_batches, request.samples_of(current.length)),
        schedule=current.schedule,
        recomputes=current.recomputes,
    )
    limit = request.memory_limit_bytes
    if limit is not None and max(plan.peak_bytes) > limit:
        return None
    return plan.lengthened(situation.correction(plan))


def fastest_per_sample(situation: PlanSituation) -> PipelinePlan:
    """Return the plan with the highest throughput.

    Where the batch grows with the replicas, plans of different lengths train different batches,
    so their times are compared by the sample.

    Raises:
        ValueError: nothing fits the memory limit.
    """
    if not situation.scale_batch:
        return plan_pipeline(situation.profile, situation.request)
    return min(
        fastest_by_length(situation).values(),
        key=lambda plan: (plan.predicted_step_s / _growth(situation, plan.length), plan.length),
    )


def fastest_by_length(situation: PlanSituation) -> dict[int, PipelinePlan]:
    """Return the fastest plan of every length that fits.

    Lengths that leave ranks idle are tried only if no other fits.

    Raises:
        ValueError: nothing fits the memory limit.
    """
    refusals = []
    choices = situation.request.length_choices()
    for lengths in choices:
        plans = {}
        for length in lengths:
            try:
                plan = plan_pipeline(situation.profile, of_length(situation, length))
                plans[length] = plan.lengthened(situation.correction(plan))
            except ValueError as error:
                # Not the error itself: its frames would keep the world's group alive.
                refusals.append(str(error))
        if plans:
            return plans
    # Of pipelines over all slots the longest has fewest layers a slot: what it lacks says most, if
    # it is memory and not layers.
    first = refusals[: len(choices[0])]
    raise ValueError(([one for one in first if "memory_limit_bytes" in one] or first)[-1])


def of_length(situation: PlanSituation, length: int) -> PlanRequest:
    """Return the request for one length, with the batch that is trained at it."""
    request, growth = situation.request, _growth(situation, length)
    return replace(request, lengths=(length,), global_batch=request.global_batch * growth)


def _growth(situation: PlanSituation, length: int) -> int:
    """Return how many times the request's batch is trained at a length."""
    return situation.request.replicas_of(length) if situation.scale_batch else 1


def published_plan(situation: PlanSituation) -> PipelinePlan:
    """Plan by the published rules; the pipeline never grows again, not even for a thaw.

    Raises:
        ValueError: the rules' plan does not fit the memory limit; see `plan_as_published`.
    """
    plan = _planned_as_published(situation)
    current = situation.current
    if current is None or plan.length <= current.length:
        return plan
    request = situation.request
    if current.length not in request.length_choices()[0]:
        return plan  # Another world; there is no such pipeline to stay with.
    return _planned_as_published(
        replace(situation, request=replace(request, lengths=(current.length,)))
    )


def _planned_as_published(situation: PlanSituation) -> PipelinePlan:
    request, profile = situation.request, situation.profile
    if situation.scale_batch:
        # Each replica must have a sample; beyond that K does not depend on the batch.
        ample = replace(request, global_batch=request.global_batch * request.num_ranks)
        request = of_length(situation, published_length(profile, ample))
    return plan_as_published(profile, request)


def pipedream_plan(situation: PlanSituation) -> PipelinePlan:
    """Plan by PipeDream's optimizer, for the stages' workers that it chose at the start.

    The stages stay while each has something to train. Then they are cut again for these workers,
    or all ranks become replicas of one stage, as the request's length says.

    Raises:
        ValueError: the optimizer's pipeline does not fit the memory limit, or the batch.
    """
    request, current = situation.request, situation.current
    if current is not None and request.lengths == (current.length,):
        stay = _stay(situation, current)
        if stay is not None:
            return stay
    return plan_as_pipedream(situation.profile, request)


_BY_NAME: Mapping[str, Planner] = {
    "fastest": fastest_plan,
    "published": published_plan,
    "pipedream": pipedream_plan,
}


def planner_of(plan: str | Planner) -> Planner:
    """Return the planner that a configuration names, or is."""
    return _BY_NAME[plan] if isinstance(plan, str) else plan

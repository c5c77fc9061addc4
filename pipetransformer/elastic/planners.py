"""Choose a pipeline: by the fastest step, by the published rules, or as PipeDream does.

A planner is a function of a `PlanSituation`: one of ours by name, or a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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


def complete_request(
    request: PlanRequest,
    profile: Profile,
    *,
    rows_found: float,
    on_gpu: bool = False,
    in_gpu_memory: bool = False,
    reads_a_row: float = math.inf,
) -> PlanRequest:
    """Add to a request what follows from the costs: the prefix's reading, a transition's round.

    Args:
        request: states the prefix's chunk.
        rows_found: share of samples whose rows are found in a later epoch; 0 without a cache. The
            prefix is cached if reading saves more until the end than writing takes.
        on_gpu: whether a GPU trains. It reads rows of host memory while the step before computes.
        in_gpu_memory: whether all rows lie there.
        reads_a_row: how often a written row will be read.
    """
    read = write = profile.cache_device_bytes_per_s if in_gpu_memory else None
    # What is computed beside the rows that are found is not hidden behind the step before.
    reads_ahead = on_gpu and read is None and rows_found == 1
    if read is None:
        read, write = profile.cache_bytes_per_s, profile.cache_write_bytes_per_s
    cached_s = None
    if rows_found and read is not None and profile.first_active(request.num_frozen):
        chunk = request.prefix_chunk or 1
        num_bytes = profile.prefix_bytes(request.num_frozen)
        read_s, write_s = num_bytes / read, num_bytes / (write or read)
        hidden_s = _least_active_s(request, profile) if reads_ahead else 0.0
        computed_s = profile.prefix_s(request.num_frozen, chunk) / chunk
        saved_s = computed_s - max(0.0, read_s - hidden_s)
        if saved_s > 0 and reads_a_row * rows_found * saved_s > write_s:
            cached_s = rows_found * read_s + (1 - rows_found) * computed_s
    return replace(
        request,
        prefix_cached_s=cached_s,
        prefix_read_ahead=cached_s is not None and reads_ahead,
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


def pipedream_plan(situation: PlanSituation, *, hidden_sums: bool = False) -> PipelinePlan:
    """Plan PipeDream's stages, for the workers that were chosen at the start.

    The stages stay while each has something to train. Then they are cut again for these workers,
    or all ranks become replicas of one stage, as the request's length says.

    Args:
        hidden_sums: choose by the paper's rule; see `autopipe.pipedream.choose`.
    Raises:
        ValueError: the chosen pipeline does not fit the memory limit, or the batch.
    """
    request, current = situation.request, situation.current
    if current is not None and request.lengths == (current.length,):
        stay = _stay(situation, current)
        if stay is not None:
            return stay
    return plan_as_pipedream(situation.profile, request, hidden_sums=hidden_sums)


PLANNERS: Mapping[str, Planner] = {
    "fastest": fastest_plan,
    "published": published_plan,
    "pipedream": pipedream_plan,
    "pipedream_paper": partial(pipedream_plan, hidden_sums=True),
}
"""Planners that a configuration may name; it may also be one."""

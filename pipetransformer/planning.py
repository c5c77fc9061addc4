"""Choose the pipeline at a decision: the fastest, unless going there costs more than it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autodp import allowed_lengths
from autopipe import PipelinePlan, PlanRequest, Profile, plan_pipeline


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
        transition_s: what the last transition cost, or a guess before the first.
        scale_batch: whether the request's batch is a pipeline's and grows with the replicas.
    """

    step: int
    remaining_steps: int
    profile: Profile
    request: PlanRequest
    current: PipelinePlan | None
    transition_s: float
    scale_batch: bool = False


Planner = Callable[[PlanSituation], PipelinePlan]


def fastest_plan(situation: PlanSituation) -> PipelinePlan:
    """Return the fastest plan if what it saves until the end exceeds a transition's cost.

    Raises:
        ValueError: nothing fits the memory limit.
    """
    best = fastest_per_sample(situation)
    current = situation.current
    if current is None or current.length == best.length:
        return best
    if current.length not in (situation.request.lengths or (current.length,)):
        return best
    try:
        stay = fastest_per_sample(replace(
            situation, request=replace(situation.request, lengths=(current.length,))))
    except ValueError:  # The current length no longer fits; there is nothing to stay with.
        return best
    # Steps are counted at the current batch, which with scale_batch is not the best plan's.
    fewer_steps = best.length / stay.length if situation.scale_batch else 1.0
    saved_s = stay.predicted_step_s - best.predicted_step_s * fewer_steps
    return best if saved_s * situation.remaining_steps > situation.transition_s else stay


def fastest_per_sample(situation: PlanSituation) -> PipelinePlan:
    """Return the plan with the highest throughput.

    Where the batch grows with the replicas, plans of different lengths train different batches,
    so their times are compared by the sample.

    Raises:
        ValueError: nothing fits the memory limit.
    """
    request = situation.request
    if not situation.scale_batch:
        return plan_pipeline(situation.profile, request)
    plans, refusals = [], []
    for length in request.lengths or allowed_lengths(request.num_ranks, request.slots_per_node):
        replicas = request.num_ranks // length
        grown = replace(request, lengths=(length,), global_batch=request.global_batch * replicas)
        try:
            plan = plan_pipeline(situation.profile, grown)
        except ValueError as error:
            refusals.append(error)
            continue
        plans.append((plan.predicted_step_s / grown.global_batch, length, plan))
    if not plans:
        raise refusals[-1]
    return min(plans, key=lambda entry: entry[:2])[2]

"""Answer a plan's request with PipeDream's pipelines: each stage's workers and sublayers.

The first stage runs the frozen sublayers forward, or reads their outputs from the cache, as the
request says. Transfers between stages count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.pipedream.simulated_rate import fastest_simulated
from autopipe.pipedream.stage_search import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    optimize,
)
from autopipe.plan import PipelinePlan, PlanRequest, plan_pipeline, predict
from autopipe.profile import Profile, SublayerCost


@dataclass(frozen=True)
class Question:
    """Hold the input of PipeDream's optimizer for a request.

    Args:
        states: the cut behind each active sublayer; the first also costs the frozen ones' time.
        levels: machines, innermost first.
        minibatch: samples; a step has one minibatch per slot.
    """

    states: tuple[CutState, ...]
    levels: tuple[Machines, ...]
    minibatch: int


def question_of(profile: Profile, request: PlanRequest) -> Question:
    """Return the input of PipeDream's optimizer for a request.

    Raises:
        ValueError: nothing is left to train.
    """
    minibatch = max(1, request.global_batch // request.num_ranks)
    first = profile.first_active(request.num_frozen)
    active = range(first, len(profile.sublayers))
    if not active:
        raise ValueError(f"{request.num_frozen} frozen layers leave nothing to train")
    forward_s = [profile.forward_s(index, minibatch) for index in active]
    backward_s = [profile.backward_s(index, minibatch) for index in active]
    if request.prefix_cached_s is None:
        frozen_s = profile.prefix_s(request.num_frozen, minibatch)
    else:
        frozen_s = minibatch * request.prefix_cached_s
        if request.prefix_read_ahead:
            # Reading hides behind training, and costs only what exceeds it.
            training_s = sum(f + b for f, b in zip(forward_s, backward_s, strict=True))
            frozen_s = max(0.0, frozen_s - training_s)
    forward_s[0] += frozen_s
    compute_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    slots = min(request.slots_per_node, request.num_ranks)
    levels = [Machines(slots, profile.link.bytes_per_s)]
    if (nodes := -(-request.num_ranks // slots)) > 1:
        levels.append(Machines(nodes, profile.node_link.bytes_per_s))
    states = _chain(profile.sublayers[first:], compute_s, forward_s, minibatch)
    return Question(states, tuple(levels), minibatch)


def _chain(
    costs: Sequence[SublayerCost],
    compute_s: Sequence[float],
    forward_s: Sequence[float],
    minibatch: int,
) -> tuple[CutState, ...]:
    output_bytes = [minibatch * cost.output_bytes for cost in costs]
    return tuple(
        CutState(
            tuple(cost.name for cost in costs[: end + 1]),
            tuple(range(end)),
            sum(compute_s[: end + 1]),
            sum(output_bytes[: end + 1]),
            float(sum(cost.parameter_bytes for cost in costs[: end + 1])),
            output_bytes[end],
            sum(forward_s[: end + 1]),
        )
        for end in range(len(costs))
    )


def choose(
    question: Question, *, memory_bytes: float | None = None, hidden_sums: bool = False
) -> ReplicatedPlan:
    """Return the pipeline of the highest simulated rate, or the choice of the paper's rule.

    Args:
        hidden_sums: a stage costs the larger of compute and sums of gradients, as in the paper.
    Raises:
        ValueError: no pipeline fits.
    """
    asked = question.states, question.levels
    if not hidden_sums:
        return fastest_simulated(*asked, memory_bytes=memory_bytes)
    return optimize(*asked, activations=True, memory_bytes=memory_bytes, hidden_sums=True)


def pipedream_stages(
    profile: Profile, request: PlanRequest, *, hidden_sums: bool = False
) -> tuple[ReplicatedStage, ...]:
    """Return the stages that are chosen over the active sublayers; see `choose`.

    Raises:
        ValueError: no pipeline fits.
    """
    question, limit = question_of(profile, request), request.memory_limit_bytes
    return choose(question, memory_bytes=limit, hidden_sums=hidden_sums).leaves


def plan_as_pipedream(
    profile: Profile, request: PlanRequest, *, hidden_sums: bool = False
) -> PipelinePlan:
    """Plan the stages that are chosen, with 1F1B, for a request that has their workers.

    The micro-batch count is the fastest of the request's, or of 1 to 6 per worker.

    Raises:
        ValueError: no pipeline is possible, or none fits the memory.
    """
    stages = pipedream_stages(profile, request, hidden_sums=hidden_sums)
    workers = tuple(stage.replicas for stage in stages)
    # Workers are fixed for a run: if frozen layers lead to others, cut the given stages ourselves.
    if len(workers) == 1 or workers != request.stage_workers:
        return plan_pipeline(profile, request)
    first, step = profile.first_active(request.num_frozen), request.num_ranks
    boundaries = (*(first + stage.begin for stage in stages), len(profile.sublayers))
    counts = request.micro_batches or range(step, 6 * step + 1, step)
    plans = [
        predict(
            profile,
            request,
            boundaries=boundaries,
            num_micro_batches=count,
            schedule="1f1b",
            recomputes=recomputes,
        )
        for recomputes in request.recompute
        for count in counts
        if count <= request.samples_of(len(workers))
    ]
    limit = request.memory_limit_bytes
    fitting = [plan for plan in plans if limit is None or max(plan.peak_bytes) <= limit]
    if not fitting:
        needs = min((max(plan.peak_bytes) for plan in plans), default=None)
        why = f"needs {needs} bytes on a slot, above memory_limit_bytes = {limit}"
        if needs is None:
            why = f"needs {min(counts)} micro-batches of {request.global_batch} samples"
        raise ValueError(
            f"PipeDream's pipeline, stages of {'-'.join(map(str, workers))} workers, {why}; "
            "choose plan='fastest', or enlarge global_batch_size or the limit"
        )
    return min(fitting, key=lambda plan: plan.predicted_step_s)

"""Answer a plan's request as PipeDream does: each stage's workers and sublayers.

The first stage runs the frozen sublayers forward, or reads their outputs from the cache, as the
request says. Transfers between stages count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.pipedream.cuts import cut_states
from autopipe.pipedream.stage_search import Machines, ReplicatedStage, optimize
from autopipe.plan import PipelinePlan, PlanRequest, plan_pipeline, predict
from autopipe.profile import LayerGraph, Profile, graph_of


@dataclass(frozen=True)
class Question:
    """Hold the input of PipeDream's optimizer for a request.

    Args:
        graph: the active sublayers; the first also costs the frozen ones' time.
        levels: machines, innermost first.
        minibatch: samples; a step has one minibatch per slot.
    """

    graph: LayerGraph
    levels: tuple[Machines, ...]
    minibatch: int


def question_of(profile: Profile, request: PlanRequest) -> Question:
    """Return the input of PipeDream's optimizer for a request."""
    minibatch = max(1, request.global_batch // request.num_ranks)
    chain, first = graph_of(profile, minibatch), profile.first_active(request.num_frozen)
    if request.prefix_cached_s is None:
        frozen_s = profile.prefix_s(request.num_frozen, minibatch)
    else:
        frozen_s = minibatch * request.prefix_cached_s
        if request.prefix_read_ahead:
            # Reading hides behind training, and costs only what exceeds it.
            frozen_s = max(0.0, frozen_s - sum(node.compute_s for node in chain.nodes[first:]))
    active = chain.without({node.name for node in chain.nodes[:first]})
    bottom = replace(active.nodes[0], forward_s=active.nodes[0].forward_s + frozen_s)
    slots = min(request.slots_per_node, request.num_ranks)
    levels = [Machines(slots, profile.link.bytes_per_s)]
    if (nodes := -(-request.num_ranks // slots)) > 1:
        levels.append(Machines(nodes, profile.node_link.bytes_per_s))
    graph = LayerGraph((bottom, *active.nodes[1:]), active.edges)
    return Question(graph, tuple(levels), minibatch)


def pipedream_stages(profile: Profile, request: PlanRequest) -> tuple[ReplicatedStage, ...]:
    """Return the stages that PipeDream's optimizer chooses, over the active sublayers.

    Raises:
        ValueError: no pipeline fits.
    """
    question = question_of(profile, request)
    limit = request.memory_limit_bytes
    states = cut_states(question.graph)
    return optimize(states, question.levels, activations=True, memory_bytes=limit).leaves


def plan_as_pipedream(profile: Profile, request: PlanRequest) -> PipelinePlan:
    """Plan PipeDream's stages with 1F1B for a request that has their workers.

    The micro-batch count is the fastest of the request's, or of 1 to 6 per worker.

    Raises:
        ValueError: no pipeline is possible, or none fits the memory.
    """
    stages = pipedream_stages(profile, request)
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

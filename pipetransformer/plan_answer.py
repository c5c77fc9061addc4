"""Find the plan for a number of frozen layers, the runners-up, and the published rules' plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autodp import ROUND_BYTES
from autopipe import PipelinePlan, PlanRequest, Profile, candidates, paper_plan, plan_pipeline
from autopipe.explain import ExplainedPlan, explain, runners_up
from autopipe.plan import least_memory_plan
from autopipe.timeline_summary import as_bytes
from pipetransformer.config import TrainConfig
from pipetransformer.plan_place import Place

PLANS = ("fastest", "paper")


@dataclass(frozen=True)
class Refusal:
    """Say why there is no plan, of a length or (None) at all."""

    length: int | None
    reason: str


@dataclass(frozen=True)
class Answer:
    """Hold what was found for a number of frozen layers.

    Args:
        request: what the planners were asked.
        chosen: the plan of the planner that was asked for.
        others: runners-up, fastest first.
        refusals: why there is no plan of some lengths.
        paper: the plan by the published rules.
    """

    request: PlanRequest
    chosen: ExplainedPlan | Refusal
    others: tuple[ExplainedPlan, ...]
    refusals: tuple[Refusal, ...]
    paper: ExplainedPlan | Refusal


def find_plan(place: Place, request: PlanRequest, *, plan: str) -> Answer:
    """Ask both planners, and compare.

    Args:
        place: costs.
        request: what to plan for.
        plan: whose plan is chosen, one of PLANS.
    """
    profile = place.profile
    paper = _ask(profile, request, paper_plan)
    fastest = _ask(profile, request, plan_pipeline)
    fitting = [] if isinstance(fastest, Refusal) else candidates(profile, request)
    chosen = paper if plan == "paper" else fastest
    others = runners_up(fitting, None if isinstance(chosen, Refusal) else chosen.plan)
    return Answer(
        request,
        chosen,
        tuple(explain(profile, request, other) for other in others),
        tuple(_refusals(profile, request, {one.length for one in fitting})),
        paper,
    )


def _ask(
    profile: Profile, request: PlanRequest, planner: Callable[[Profile, PlanRequest], PipelinePlan]
) -> ExplainedPlan | Refusal:
    try:
        return explain(profile, request, planner(profile, request))
    except ValueError as error:
        return Refusal(None, str(error))


def make_request(
    place: Place,
    *,
    global_batch: int,
    num_frozen: int,
    memory_limit_bytes: int | None,
    cached: bool,
) -> PlanRequest:
    """State what the Trainer would ask of its planner.

    Raises:
        ValueError: a value is out of range, or the place does not say how fast a cache is.
    """
    most = max(cost.layer for cost in place.profile.sublayers)
    if num_frozen > most:
        raise ValueError(
            f"{num_frozen} layers cannot be frozen; the model has {most} beside its "
            f"head, which never freezes: give 0 to {most}"
        )
    limit = place.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    return PlanRequest(
        num_ranks=place.num_slots,
        slots_per_node=place.slots_per_node,
        global_batch=global_batch,
        num_frozen=num_frozen,
        memory_limit_bytes=limit,
        prefix_chunk=TrainConfig.prefix_chunk,
        round_bytes=ROUND_BYTES if place.num_slots > 1 else 0,
        prefix_cached_s=_cached_s(place, num_frozen) if cached else None,
    )


def _cached_s(place: Place, num_frozen: int) -> float | None:
    """Return a cached sample's read time, or None where computing the prefix is no slower."""
    profile, chunk = place.profile, TrainConfig.prefix_chunk
    if place.cache_bytes_per_s is None:
        raise ValueError(
            f"{place.name} does not say how fast a cache is read; add "
            "cache_bytes_per_s to its file, or leave --cached out"
        )
    frozen = [i for i, cost in enumerate(profile.sublayers) if cost.layer < num_frozen]
    if not frozen:
        return None
    computed_s = sum(profile.frozen_s(index, chunk) for index in frozen) / chunk
    read_s = profile.sublayers[frozen[-1]].output_bytes / place.cache_bytes_per_s
    return read_s if read_s < computed_s else None


def _refusals(profile: Profile, request: PlanRequest, found: set[int]) -> Iterator[Refusal]:
    """Say for every length that has no plan why."""
    num_active = sum(cost.layer >= request.num_frozen for cost in profile.sublayers)
    for length in request.length_choices()[0]:
        replicas = request.replicas_of(length)
        if length in found:
            continue
        if length > num_active:
            yield Refusal(length, f"{num_active} active sublayers cannot fill {length} stages")
        elif replicas > request.global_batch:
            yield Refusal(
                length,
                f"{request.global_batch} samples leave some of {replicas} replicas without one",
            )
        else:
            least = least_memory_plan(profile, replace(request, lengths=(length,)))
            needed = max(least.peak_bytes)
            yield Refusal(
                length,
                f"does not fit: stage {least.peak_bytes.index(needed)} needs "
                f"{as_bytes(needed)} of {as_bytes(request.memory_limit_bytes or 0)}, "
                f"at best (M = {least.num_micro_batches}, {least.schedule})",
            )

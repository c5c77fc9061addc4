"""Find the fastest plan for a number of frozen layers, its runners-up, and what others choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from autopipe.pipedream import ReplicatedPlan, choose, question_of
from autopipe.plan import (
    ExplainedPlan,
    PipelinePlan,
    PlanRequest,
    candidates,
    explain,
    least_memory_plan,
    near_fastest,
    plan_as_published,
    runners_up,
    step_range,
)
from autopipe.profile import Profile
from autopipe.trace import as_bytes
from pipetransformer.cli.places import Place

_MOST_SLOTS = 64
"""Of all nodes, for PipeDream's choice: simulating more takes minutes."""
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Refusal:
    """Say why there is no plan, of a length or (None) at all."""

    length: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Replicated:
    """Hold PipeDream's choice; each of `stages` names its sublayers."""

    plan: ReplicatedPlan
    stages: list[list[str]]
    samples_per_s: float

    def to_json(self) -> dict[str, Any]:
        return {**self.plan.to_json(), "stage_nodes": self.stages}


@dataclass(frozen=True)
class Answer:
    """Hold what was found for a number of frozen layers.

    Args:
        others: runners-up, fastest first.
        refusals: why some lengths have no plan.
        published: by the published rules.
        pipedream: of the highest simulated rate, whose stages have their own replicas.
        near: plans that cannot be told from the fastest, which is among them, shortest first.
        range_s: the chosen plan's step by the quartiles of the measurements; None without a plan.
    """

    place: Place
    request: PlanRequest
    chosen: ExplainedPlan | Refusal
    others: tuple[ExplainedPlan, ...]
    refusals: tuple[Refusal, ...]
    published: ExplainedPlan | Refusal
    pipedream: Replicated | Refusal
    near: tuple[PipelinePlan, ...] = ()
    range_s: tuple[float, float] | None = None


def find_plan(place: Place, request: PlanRequest) -> Answer:
    """Ask all planners, and compare. A request with stage_workers gets its pipeline."""
    profile = place.profile
    bare = replace(request, stage_workers=None)  # The published rules do not know them.
    published = _or_refusal(lambda: explain(profile, bare, plan_as_published(profile, bare)))
    pipedream = _or_refusal(lambda: replicate(profile, request))
    asked = request  # Other lengths than the workers' are still compared, as runners-up.
    if request.stage_workers is not None:
        asked = replace(request, lengths=(len(request.stage_workers),))
    near = _or_refusal(lambda: near_fastest(profile, asked))
    if isinstance(near, Refusal):
        refusals = tuple(_refusals(profile, request, set()))
        return Answer(place, request, near, (), refusals, published, pipedream)
    fitting = candidates(profile, request)
    return Answer(
        place,
        request,
        explain(profile, asked, near[0]),
        tuple(explain(profile, request, other) for other in runners_up(fitting, near[0])),
        tuple(_refusals(profile, request, {plan.length for plan in fitting})),
        published,
        pipedream,
        tuple(near),
        step_range(profile, asked, near[0]),
    )


def replicate(profile: Profile, request: PlanRequest) -> Replicated:
    """Return PipeDream's choice; a ValueError if none fits, or slots or nodes are too many."""
    asked = question_of(profile, request)
    slots = math.prod(level.count for level in asked.levels)
    if slots > _MOST_SLOTS:
        raise ValueError(f"{slots} slots are too many to simulate; at most {_MOST_SLOTS} are")
    plan = choose(asked, memory_bytes=request.memory_limit_bytes)
    names = asked.states[-1].nodes
    stages = [list(names[leaf.begin : leaf.end]) for leaf in plan.leaves]
    return Replicated(plan, stages, asked.minibatch / plan.seconds)


def _or_refusal(find: Callable[[], _Found]) -> _Found | Refusal:
    try:
        return find()
    except ValueError as error:
        return Refusal(None, str(error))


def _refusals(profile: Profile, request: PlanRequest, found: set[int]) -> Iterator[Refusal]:
    """Yield a reason for every length without a plan."""
    num_active = len(profile.sublayers) - profile.first_active(request.num_frozen)
    for length in request.length_choices()[0]:
        replicas, samples = request.replicas_of(length), request.global_batch
        if length in found:
            continue
        if length > num_active:
            reason = f"{num_active} active sublayers cannot fill {length} stages"
        elif replicas > samples:
            reason = f"{samples} samples leave some of {replicas} replicas without one"
        else:
            least = least_memory_plan(profile, replace(request, lengths=(length,)))
            needed = max(least.peak_bytes)
            reason = (
                f"does not fit: stage {least.peak_bytes.index(needed)} needs "
                f"{as_bytes(needed)} of {as_bytes(request.memory_limit_bytes or 0)}, "
                f"at best (M = {least.num_micro_batches}, {least.manner})"
            )
        yield Refusal(length, reason)

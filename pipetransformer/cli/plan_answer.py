"""Find the plan for a number of frozen layers, the runners-up, and the published rules' plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

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
from pipetransformer.cli.replicated_stages import Replicated, replicate

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Refusal:
    """Say why there is no plan, of a length or (None) at all."""

    length: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """Hold what was found for a number of frozen layers.

    Args:
        chosen: the plan of the planner that was asked for.
        others: runners-up, fastest first.
        refusals: why there is no plan of some lengths.
        pipedream: the choice of PipeDream's optimizer, whose stages have their own replicas.
        near: what cannot be told from the fastest plan, itself included, shortest first.
        range_s: the chosen plan's step by the quartiles of what was measured; None without one.
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


def find_plan(place: Place, request: PlanRequest, *, plan: str) -> Answer:
    """Ask all planners, and compare; `plan` names the one whose plan is chosen.

    PipeDream's stands beside the fastest. A pipeline of stages with workers of their own is chosen
    where the request has one.
    """
    profile = place.profile
    bare = replace(request, stage_workers=None)  # Of which the published rules know nothing.
    published = _or_refusal(lambda: explain(profile, bare, plan_as_published(profile, bare)))
    asked = request
    if request.stage_workers is not None:
        asked = replace(request, lengths=(len(request.stage_workers),))
    near = _or_refusal(lambda: near_fastest(profile, asked))
    fastest = near if isinstance(near, Refusal) else explain(profile, asked, near[0])
    fitting = [] if isinstance(near, Refusal) else candidates(profile, request)
    chosen = published if plan == "published" else fastest
    others = runners_up(fitting, None if isinstance(chosen, Refusal) else chosen.plan)
    return Answer(
        place,
        request,
        chosen,
        tuple(explain(profile, request, other) for other in others),
        tuple(_refusals(profile, request, {one.length for one in fitting})),
        published,
        _or_refusal(lambda: replicate(place, request)),
        () if isinstance(near, Refusal) else tuple(near),
        None if isinstance(chosen, Refusal) else step_range(profile, asked, chosen.plan),
    )


def _or_refusal(find: Callable[[], _Found]) -> _Found | Refusal:
    try:
        return find()
    except ValueError as error:
        return Refusal(None, str(error))


def _refusals(profile: Profile, request: PlanRequest, found: set[int]) -> Iterator[Refusal]:
    """Say for every length that has no plan why."""
    num_active = len(profile.sublayers) - profile.first_active(request.num_frozen)
    for length in request.length_choices()[0]:
        replicas = request.replicas_of(length)
        if length in found:
            continue
        if length > num_active:
            reason = f"{num_active} active sublayers cannot fill {length} stages"
        elif replicas > request.global_batch:
            reason = (
                f"{request.global_batch} samples leave some of {replicas} replicas without one"
            )
        else:
            least = least_memory_plan(profile, replace(request, lengths=(length,)))
            needed = max(least.peak_bytes)
            reason = (
                f"does not fit: stage {least.peak_bytes.index(needed)} needs "
                f"{as_bytes(needed)} of {as_bytes(request.memory_limit_bytes or 0)}, "
                f"at best (M = {least.num_micro_batches}, {least.schedule})"
            )
        yield Refusal(length, reason)

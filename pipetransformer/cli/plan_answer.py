"""Find the plan for a number of frozen layers, its runners-up, and the choices of other rules."""

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
        chosen: of the planner that was asked for.
        others: runners-up, fastest first.
        refusals: why some lengths have no plan.
        pipedream: of PipeDream's optimizer, whose stages have their own replicas.
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


def find_plan(place: Place, request: PlanRequest, *, plan: str) -> Answer:
    """Ask all planners, and compare.

    Args:
        plan: whose plan is chosen. "pipedream" stands beside the fastest. A request with
            stage_workers gets its pipeline.
    """
    profile = place.profile
    bare = replace(request, stage_workers=None)  # The published rules do not know them.
    published = _or_refusal(lambda: explain(profile, bare, plan_as_published(profile, bare)))
    asked = request  # Other lengths than the workers' are still compared, as runners-up.
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

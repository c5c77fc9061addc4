"""Choose a pipeline: its length, each stage's sublayers, the micro-batches, the schedule.

A candidate's step is predicted by simulating its schedule with the profile's times. The fastest
that fits the memory wins. But measurements have errors, so among nearly equal ones the shortest
pipeline wins:

    step_s   K = 2 |---x---|          x the prediction with medians, |---| with quartiles
             K = 1     |---x---|      x within the width of |---| from K = 2's: K = 1 is taken
             K = 4                |---x---|
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise

from autopipe.partition import PartCost, best_split, per_part
from autopipe.plan.estimate import StepModel
from autopipe.plan.request import PipelinePlan, PlanRequest
from autopipe.plan.simulation import Simulation
from autopipe.profile import Profile

AS_FAST = 1.01
"""Predictions within this factor count as equal, even if measured times had no spread."""


def plan_pipeline(profile: Profile, request: PlanRequest) -> PipelinePlan:
    """Choose the shortest pipeline of `near_fastest`."""
    return near_fastest(profile, request)[0]


def near_fastest(profile: Profile, request: PlanRequest) -> list[PipelinePlan]:
    """Return a plan of every length that may be the fastest, shortest first.

    Its predicted step exceeds the fastest plan's by at most the width of that plan's `step_range`,
    or by 1 %. Of a length's plans within 1 % of its fastest, the one with the fewest micro-batches
    is taken: these share the same measured times, so that errors cancel.

    Raises:
        ValueError: no length or micro-batch count is possible, or nothing fits the memory.
    """
    plans: list[PipelinePlan] = []
    fastest_s = near_s = math.inf
    fitting = _fitting(profile, request)
    # What a step may take decides between lengths alone.
    has_lengths = len({len(candidate.split) for candidate in fitting}) > 1
    for candidate in sorted(fitting, key=lambda candidate: candidate.least_s):
        # Lower bounds ascend, so all that follow are too slow as well: simulate no more.
        if candidate.least_s > near_s * AS_FAST:
            break
        plans.append(plan := candidate.plan())
        if plan.predicted_step_s < fastest_s:
            fastest_s = plan.predicted_step_s
            low_s, high_s = step_range(profile, request, plan) if has_lengths else (0.0, 0.0)
            near_s = fastest_s + max((AS_FAST - 1) * fastest_s, high_s - low_s)
    if not plans:
        least = least_memory_plan(profile, request)
        needs = max(least.peak_bytes)
        raise ValueError(
            f"no plan fits memory_limit_bytes = {request.memory_limit_bytes}: the smallest, "
            f"{least.length} stages x {least.num_micro_batches} micro-batches ({least.manner}), "
            f"needs {needs} bytes on stage {least.peak_bytes.index(needs)}; raise the limit, "
            f"lower the global batch, add device slots"
            f"{'' if True in request.recompute else ', recompute activations'} or freeze more "
            "layers"
        )
    lengths = sorted({plan.length for plan in plans if plan.predicted_step_s <= near_s})
    return [
        _plainest([plan for plan in plans if plan.length == length], request.schedules)
        for length in lengths
    ]


def _plainest(plans: Sequence[PipelinePlan], schedules: Sequence[str]) -> PipelinePlan:
    fastest_s = min(plan.predicted_step_s for plan in plans)
    return min(
        (plan for plan in plans if plan.predicted_step_s <= fastest_s * AS_FAST),
        key=lambda plan: (plan.recomputes, plan.num_micro_batches, schedules.index(plan.schedule)),
    )


def step_range(profile: Profile, request: PlanRequest, plan: PipelinePlan) -> tuple[float, float]:
    """Predict a plan's step with the lower and with the upper quartiles of measured times."""
    low_s, high_s = (step_s(one, request, plan) for one in profile.quartiles())
    return low_s, high_s


def candidates(profile: Profile, request: PlanRequest) -> list[PipelinePlan]:
    """Return a plan for every length, micro-batch count and schedule that fits, fastest first.

    Raises:
        ValueError: no length or micro-batch count is possible.
    """
    plans = [candidate.plan() for candidate in _fitting(profile, request)]
    return sorted(plans, key=lambda plan: plan.predicted_step_s)


def predict(
    profile: Profile,
    request: PlanRequest,
    *,
    boundaries: tuple[int, ...],
    num_micro_batches: int,
    schedule: str,
    recomputes: bool = False,
) -> PipelinePlan:
    """Predict one pipeline, whether it fits the memory or not.

    Args:
        boundaries, num_micro_batches, schedule, recomputes: as in `PipelinePlan`.
    Raises:
        ValueError: the boundaries do not cover the active sublayers, or the cluster or the batch
            does not allow the length or the micro-batch count.
    """
    # The request narrowed to one shape refuses what the cluster or the batch does not allow.
    only = replace(
        request,
        lengths=(len(boundaries) - 1,),
        micro_batches=(num_micro_batches,),
        schedules=(schedule,),
    )
    model = StepModel(profile, only, recomputes=recomputes)
    split = tuple(boundary - model.first_active for boundary in boundaries)
    if (split[0], split[-1]) != (0, model.num_units) or any(a >= b for a, b in pairwise(split)):
        raise ValueError(
            f"boundaries {boundaries} must ascend from {model.first_active} to "
            f"{len(profile.sublayers)}, over the sublayers that {request.num_frozen} frozen "
            f"layers leave active"
        )
    ((_, sizes),) = _shapes(model, (len(split) - 1,))
    return _Candidate(model, sizes, schedule, split).plan()


def step_s(profile: Profile, request: PlanRequest, plan: PipelinePlan) -> float:
    """Predict a plan's step anew."""
    return _candidate(profile, request, plan).step_s()[0]


def simulate_plan(profile: Profile, request: PlanRequest, plan: PipelinePlan) -> Simulation:
    """Execute a plan's schedule on a clock, without sums of gradients, update and overhead."""
    one = _candidate(profile, request, plan)
    return one.model.simulation(one.schedule, one.sizes, one.split)


def stage_compute_s(
    profile: Profile, request: PlanRequest, plan: PipelinePlan
) -> tuple[float, ...]:
    """Predict each stage's computing in a step of the largest replica, without fetching."""
    one = _candidate(profile, request, plan)
    first_s, *others_s = per_part(one.model.work_s(one.sizes, plan.length), one.split)
    return first_s - one.model.fetch_s(one.sizes, plan.length), *others_s


def _candidate(profile: Profile, request: PlanRequest, plan: PipelinePlan) -> _Candidate:
    """Return a plan as it is priced."""
    model = StepModel(profile, request, recomputes=plan.recomputes)
    sizes = request.sizes_of(plan.length, plan.num_micro_batches)
    split = tuple(boundary - model.first_active for boundary in plan.boundaries)
    return _Candidate(model, sizes, plan.schedule, split)


def least_memory_plan(profile: Profile, request: PlanRequest) -> PipelinePlan:
    """Return the plan whose fullest stage needs the fewest bytes, whether it fits or not.

    Raises:
        ValueError: no length or micro-batch count is possible.
    """
    # Recomputing saves memory wherever it is allowed.
    model = StepModel(profile, request, recomputes=request.recompute[-1])
    smallest: tuple[float, _Candidate] | None = None
    for length, sizes in chain.from_iterable(_possible_shapes(model)):
        for schedule in request.schedules_of(length):
            num_bytes = model.stage_bytes(sizes, length, schedule)
            # grows=False: by taking its lower neighbour, a part may receive a smaller tensor.
            split = best_split(model.num_units, length, num_bytes, grows=False)
            assert split is not None, "without a limit every shape can be split"
            needs = max(per_part(num_bytes, split))
            if smallest is None or needs < smallest[0]:
                smallest = needs, _Candidate(model, sizes, schedule, split)
    assert smallest is not None, "there is at least one shape"
    return smallest[1].plan()


@dataclass(frozen=True)
class _Candidate:
    """Hold a possible plan; its step takes at least `least_s`."""

    model: StepModel
    sizes: tuple[int, ...]
    schedule: str
    split: tuple[int, ...]
    least_s: float = 0.0

    def step_s(self) -> tuple[float, float]:
        return self.model.step_s(self.schedule, self.sizes, self.split)

    def plan(self) -> PipelinePlan:
        model, length = self.model, len(self.split) - 1
        peak_bytes = per_part(model.stage_bytes(self.sizes, length, self.schedule), self.split)
        predicted_s, fetch_s = self.step_s()
        return PipelinePlan(
            length,
            tuple(model.first_active + unit for unit in self.split),
            len(self.sizes),
            self.schedule,
            predicted_s,
            tuple(map(int, peak_bytes)),
            fetch_s,
            model.recomputes,
        )


def _possible_shapes(model: StepModel) -> list[list[tuple[int, tuple[int, ...]]]]:
    """List the shapes (length, micro-batch sizes) of each choice of lengths that allows any."""
    choices, refusals = [], []
    for lengths in model.request.length_choices():
        try:
            choices.append(_shapes(model, lengths))
        except ValueError as error:
            # The text alone: an error kept in its own frame is a cycle, freed only by the gc.
            refusals.append(str(error))
    if not choices:
        raise ValueError(refusals[0])
    return choices


def _shapes(model: StepModel, wanted: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    request = model.request
    lengths = [
        length
        for length in wanted
        if length <= model.num_units and request.replicas_of(length) <= request.most_replicas
    ]
    shapes = []
    for length in lengths:
        num_samples = request.samples_of(length)
        workers = sum(request.workers_of(length))
        counts = request.micro_batches or _micro_batch_counts(workers, num_samples)
        shapes += [
            (length, request.sizes_of(length, count))
            for count in (counts if request.micro_batch_size is None else (1,))
            if count <= num_samples  # A micro-batch needs a sample.
        ]
    if not shapes:
        raise ValueError(
            f"no pipeline is possible: {model.num_units} active sublayers and a global batch of "
            f"{request.global_batch} on {request.num_ranks} ranks allow {lengths} of the lengths "
            f"{list(wanted)}, and micro-batches need a sample each; allow shorter pipelines or "
            f"fewer micro-batches, or enlarge the global batch"
        )
    return shapes


def _micro_batch_counts(num_workers: int, num_samples: int) -> list[int]:
    """Return the powers of two and the multiples of num_workers, up to 6 num_workers or 8.

    A single stage gets all powers: more micro-batches need less memory for activations.
    """
    most = max(6 * num_workers, 8)
    powers = [1 << n for n in range((num_samples if num_workers == 1 else most).bit_length())]
    return sorted({*powers, *range(num_workers, most + 1, num_workers)})


def _fitting(profile: Profile, request: PlanRequest) -> list[_Candidate]:
    """Return the candidates of the first choice of lengths that has any."""
    models = [StepModel(profile, request, recomputes=one) for one in request.recompute]
    by_choice = (list(_split_all(models, shapes)) for shapes in _possible_shapes(models[0]))
    return next(filter(None, by_choice), [])


def _split_all(
    models: Sequence[StepModel], shapes: list[tuple[int, tuple[int, ...]]]
) -> Iterator[_Candidate]:
    """Split every shape so that its slowest stage is fastest, among the splits that fit.

    A later model, which recomputes, counts where the memory limits an earlier one.
    """
    has_single_stage = set[StepModel]()
    for length, sizes in shapes:
        for model in models:
            # A single stage has no bubble to fill: the fewest micro-batches that fit are enough.
            open_counts = model.request.micro_batches is None
            if length == 1 and model in has_single_stage and open_counts:
                break
            found, is_limited = _split(model, sizes, length)
            yield from found
            if length == 1 and found:
                has_single_stage.add(model)
            if not is_limited:
                break


def _split(model: StepModel, sizes: tuple[int, ...], length: int) -> tuple[list[_Candidate], bool]:
    """Split a shape for each schedule; say whether memory keeps all from the fastest split."""
    work_s, limit = model.work_s(sizes, length), model.request.memory_limit_bytes
    # The same for all schedules, and most often it fits the memory.
    unlimited = best_split(model.num_units, length, work_s)
    assert unlimited is not None, "without a limit every shape can be split"
    splits, is_limited = [], True
    for schedule in model.request.schedules_of(length):
        split: tuple[int, ...] | None = unlimited
        num_bytes = model.stage_bytes(sizes, length, schedule)
        if limit is None or max(per_part(num_bytes, unlimited)) <= limit:
            is_limited = False
        else:
            split = best_split(
                model.num_units, length, work_s, feasible=partial(_within, num_bytes, limit)
            )
        if split is not None:
            least_s = model.least_step_s(sizes, split)
            splits.append(_Candidate(model, sizes, schedule, split, least_s))
    return splits, is_limited


def _within(num_bytes: PartCost, limit: int, part: int, first: int, last: int) -> bool:
    return num_bytes(part, first, last) <= limit

"""Choose a pipeline by the published rules, for comparison with ours.

Legend: K stages, M micro-batches, T the number of freeze decisions so far.

Source: PipeTransformer section 3.2 and Algorithm 1 (AutoPipe). Ours differs where text and
algorithm disagree, or our engine needs more:
- compress at `<=` as in the text, not at the algorithm's `<`;
- count frozen parameters, at lambda = 1/6 on partition 0; the printed algorithm never adds them;
- give each stage at least one sublayer, where the greedy balance may leave stages empty;
- take another M if the table's best does not fit the memory, and recompute if none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import TypeAlias

from autopipe.partition import greedy_partition
from autopipe.plan.request import PipelinePlan, PlanRequest
from autopipe.plan.search import predict
from autopipe.profile import Profile

Table: TypeAlias = Mapping[int, float]
"""Samples per second by M."""

FROZEN_COST = 1 / 6
"""Weight of a frozen parameter relative to an active one (the paper's lambda)."""

_BYTES_PER_MILLION = 4e6
"""The rules depend on the unit, which is millions of float32 parameters, as published."""


def plan_as_published(
    profile: Profile, request: PlanRequest, *, frozen_cost: float = FROZEN_COST
) -> PipelinePlan:
    """Plan as published: Algorithm 1 for K and the split, the throughput table for M, GPipe.

    Args:
        frozen_cost: lambda. The printed algorithm, and the K that the paper lists, amount to 0.
    Raises:
        ValueError: the request excludes GPipe, no length is possible, or no M fits the memory.
    """
    length = published_length(profile, request, frozen_cost=frozen_cost)
    boundaries = published_split(profile, request.num_frozen, length, frozen_cost=frozen_cost)
    table = throughput_table(profile, request, length)
    limit, needed = request.memory_limit_bytes, []
    for recomputes, count in product(request.recompute, best_first(table)):
        plan = predict(
            profile,
            request,
            boundaries=boundaries,
            num_micro_batches=count,
            schedule="gpipe",
            recomputes=recomputes,
        )
        if limit is None or max(plan.peak_bytes) <= limit:
            return plan
        needed.append(max(plan.peak_bytes))
    raise ValueError(
        f"the published rules give {length} stages, which need {min(needed)} bytes with the best "
        f"M of {sorted(table)}, above memory_limit_bytes = {limit}; they count parameters, not "
        f'bytes: choose plan="fastest" or raise the limit'
    )


def throughput_table(profile: Profile, request: PlanRequest, length: int) -> Table:
    """Return simulated samples/s by M, for M in K, 2 K, .., 6 K, with nothing frozen.

    The paper measures it before training, once for each K. A replica with fewer than K samples has
    one M, their number. Counts that the request names need a sample each.

    Raises:
        ValueError: the batch or the sublayers do not allow the length.
    """
    num_samples = request.samples_of(length)
    wanted = request.micro_batches or range(length, 6 * length + 1, length)
    counts = [count for count in wanted if count <= num_samples]
    if not counts and request.micro_batches is None:
        counts = [num_samples]
    boundaries = published_split(profile, 0, length)
    # Nothing is frozen before training, and so nothing cached.
    at_first = replace(request, num_frozen=0, prefix_cached_s=None)
    gpipe = partial(predict, profile, at_first, boundaries=boundaries, schedule="gpipe")
    plans = {n: gpipe(num_micro_batches=n, recomputes=request.recompute[0]) for n in counts}
    return {n: request.global_batch / plan.predicted_step_s for n, plan in plans.items()}


def published_length(
    profile: Profile, request: PlanRequest, *, frozen_cost: float = FROZEN_COST
) -> int:
    """Halve K from its start while the largest partition stays within the largest at T = 0.

    Raises:
        ValueError: the request excludes GPipe, or no length is possible.
    """
    lengths = _lengths(profile, request)
    num_active = len(_sizes(profile, request.num_frozen)[0])
    at_first = _largest(profile, 0, lengths[0], frozen_cost)
    fitting: list[int] = []
    for length in lengths:
        largest = _largest(profile, request.num_frozen, length, frozen_cost)
        # Too few sublayers for a length force another halving, whatever the largest part.
        if fitting and fitting[-1] <= num_active and largest > at_first:
            break
        fitting.append(length)
    if fitting[-1] > num_active:
        raise ValueError(
            f"{num_active} active sublayers cannot fill any of {fitting} stages; allow fewer"
        )
    return fitting[-1]


def published_split(
    profile: Profile, num_frozen: int, length: int, *, frozen_cost: float = FROZEN_COST
) -> tuple[int, ...]:
    """Balance the active sublayers greedily by their parameters; return K + 1 boundaries.

    Raises:
        ValueError: there are fewer active sublayers than stages.
    """
    sizes, frozen = _sizes(profile, num_frozen)
    if not 1 <= length <= len(sizes):
        most = len(sizes)
        raise ValueError(
            f"{most} active sublayers cannot fill {length} stages; choose from 1 to {most}"
        )
    cuts = list(greedy_partition(sizes, length, first_extra=frozen_cost * frozen))
    # Each empty stage takes its neighbour's nearest sublayer; other cuts stay as they are.
    for stage in range(1, length):
        cuts[stage] = max(cuts[stage], cuts[stage - 1] + 1)
    for stage in range(length - 1, 0, -1):
        cuts[stage] = min(cuts[stage], cuts[stage + 1] - 1)
    first_active = len(profile.sublayers) - len(sizes)
    return tuple(first_active + cut for cut in cuts)


def _lengths(profile: Profile, request: PlanRequest) -> list[int]:
    """Return the longest K within a node, its half, and so on."""
    if "gpipe" not in request.schedules:
        given = f"schedules is {request.schedules}; leave the schedule open"
        raise ValueError(f"the published rules train with 'gpipe', but {given}")
    allowed = [
        length
        for length in request.length_choices()[0]
        if request.replicas_of(length) <= request.global_batch
    ]
    longest = min(request.slots_per_node, len(profile.sublayers))
    lengths = [max((length for length in allowed if length <= longest), default=0)]
    if not lengths[0]:
        raise ValueError(
            f"a published pipeline stays within the {request.slots_per_node} slots of a node, has "
            f"a sublayer a stage and a sample a replica; lengths = {request.lengths} allow none"
        )
    while lengths[-1] % 2 == 0 and lengths[-1] // 2 in allowed:
        lengths.append(lengths[-1] // 2)
    return lengths


def _sizes(profile: Profile, num_frozen: int) -> tuple[list[float], float]:
    """Return the active sublayers' sizes and the size of the frozen ones together."""
    sizes = [cost.parameter_bytes / _BYTES_PER_MILLION for cost in profile.sublayers]
    first_active = profile.first_active(num_frozen)
    return sizes[first_active:], sum(sizes[:first_active])


def _largest(profile: Profile, num_frozen: int, length: int, frozen_cost: float) -> float:
    """Return the largest partition as published, where parts may be empty."""
    sizes, frozen = _sizes(profile, num_frozen)
    extra = frozen_cost * frozen
    parts = [
        sum(sizes[a:b]) for a, b in pairwise(greedy_partition(sizes, length, first_extra=extra))
    ]
    return max(parts[0] + extra, *parts)


def best_first(table: Table) -> list[int]:
    """Return every M, the highest throughput first; of equals the smallest first."""
    # Nine digits, so that rounding makes no difference.
    return sorted(table, key=lambda count: (-float(f"{table[count]:.9g}"), count))

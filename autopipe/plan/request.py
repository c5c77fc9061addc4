"""State a request for a plan, the plan itself, and where a cluster's pipelines lie.

A pipeline stays within a node, or fills whole nodes. A remainder of slots or nodes stays idle as
spares. A stage's ring passes its ranks in ascending order, and so leaves each of its nodes once:

    2 nodes of 4 slots, K = 2:        stage 0   0 2 | 4 6     two rings share each node's link
                                      stage 1   1 3 | 5 7
    the same, at most 2 pipelines:    stage 0   0 2           no ring leaves its node
                                      stage 1   1 3
    stages of 3, 2 and 3 workers:     stage 0   0 1 2         stage 1 alone uses the link
                                      stage 1       3 | 4
                                      stage 2           5 6 7
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from autopipe.profile import Ring, with_tuples
from autopipe.schedule import SCHEDULES, micro_batch_sizes


@dataclass(frozen=True)
class PipelinePlan:
    """State a pipeline and its predicted costs.

    Args:
        length: stages (K).
        boundaries: K + 1 indices over all sublayers; stage j trains sublayers boundaries[j] ..
            boundaries[j + 1] - 1. Stage 0 also holds the frozen sublayers below boundaries[0].
        num_micro_batches: micro-batches of a replica's step (M).
        schedule: a name of `schedule.SCHEDULES`.
        peak_bytes: modelled bytes of each stage.
        fetch_s: the part of the step in which stage 0 gets the samples behind the frozen prefix,
            or waits for rows that are read ahead.
        recomputes: whether active sublayers keep only their inputs, and run forward again in the
            backward. The model's last sublayer keeps all: its backward mostly follows at once.
    """

    length: int
    boundaries: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    predicted_step_s: float
    peak_bytes: tuple[int, ...]
    fetch_s: float = 0.0
    recomputes: bool = False

    @property
    def manner(self) -> str:
        """Name the schedule, and say whether forwards run again."""
        return f"{self.schedule}, recomputed" if self.recomputes else self.schedule

    @property
    def training_s(self) -> float:
        """Return the predicted seconds of a step without fetching its samples."""
        return self.predicted_step_s - self.fetch_s

    def lengthened(self, factor: float) -> PipelinePlan:
        """Return the plan with predicted times multiplied by a factor."""
        step_s, fetch_s = factor * self.predicted_step_s, factor * self.fetch_s
        return replace(self, predicted_step_s=step_s, fetch_s=fetch_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> PipelinePlan:
        return PipelinePlan(**with_tuples(values))


@dataclass(frozen=True)
class PlanRequest:
    """State what to plan for.

    Args:
        num_ranks: device slots that train.
        global_batch: samples of a step over all replicas.
        memory_limit_bytes: modelled bytes that a slot may hold; None for no limit.
        prefix_cached_s: seconds per sample to read the frozen prefix's activations; None if each
            step computes them.
        prefix_read_ahead: whether they are read while the previous step computes. Reading then
            counts only as far as it takes longer than that step.
        prefix_chunk: samples that the prefix runs at a time, the last chunk filled up; None for a
            micro-batch's.
        round_bytes: bytes that a transition brings a rank at a time; 0 without transitions.
        lengths: pipeline lengths to consider. None for all that fit the cluster; lengths that
            leave slots idle count only if no other is feasible.
        max_replicas: most pipelines that train side by side; None for no limit.
        stage_workers: workers of each stage of one pipeline of all ranks, which replaces those of
            its length; a stage's workers share its micro-batches.
        micro_batches: micro-batch counts to consider; None for a sensible selection.
        micro_batch_size: samples of every micro-batch but a batch's last, which sets their number;
            None leaves the number open.
        schedules: schedules to consider; the earlier one wins a tie.
        recompute: whether plans may recompute activations: (False,), (True,), or (False, True),
            where they may if the memory excludes the fastest split without.
    Raises:
        ValueError: a count is out of range, a length does not fit the cluster, a schedule is
            unknown, or there is no choice of recomputing.
    """

    num_ranks: int
    slots_per_node: int
    global_batch: int
    num_frozen: int
    memory_limit_bytes: int | None = None
    prefix_cached_s: float | None = None
    prefix_read_ahead: bool = False
    prefix_chunk: int | None = None
    round_bytes: int = 0
    lengths: tuple[int, ...] | None = None
    max_replicas: int | None = None
    stage_workers: tuple[int, ...] | None = None
    micro_batches: tuple[int, ...] | None = None
    micro_batch_size: int | None = None
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    recompute: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("num_ranks", self.num_ranks, 1),
            ("slots_per_node", self.slots_per_node, 1),
            ("global_batch", self.global_batch, 1),
            ("num_frozen", self.num_frozen, 0),
            ("prefix_chunk", self.prefix_chunk or 1, 1),
            ("round_bytes", self.round_bytes, 0),
            ("max_replicas", 1 if self.max_replicas is None else self.max_replicas, 1),
            ("micro_batches", min(self.micro_batches or (1,)), 1),
            ("micro_batch_size", 1 if self.micro_batch_size is None else self.micro_batch_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        if self.stage_workers is not None:
            workers = self.stage_workers
            if min(workers, default=0) < 1 or sum(workers) != self.num_ranks:
                raise ValueError(
                    f"stage_workers {workers} are not a worker or more a stage, and all "
                    f"{self.num_ranks} ranks together"
                )
        for length in self.lengths or ():
            if length < 1 or not self.replicas_of(length):
                fitting = chain(*length_choices(self.num_ranks, self.slots_per_node))
                raise ValueError(
                    f"pipeline length {length} does not fit {self.num_ranks} ranks with "
                    f"{self.slots_per_node} slots a node; choose from {sorted(fitting)}"
                )
        if not self.schedules or not set(self.schedules) <= set(SCHEDULES):
            raise ValueError(
                f"schedules {[*self.schedules]} are not all known; choose from {[*SCHEDULES]}"
            )
        if self.recompute not in ((False,), (True,), (False, True)):
            raise ValueError(
                f"recompute is {self.recompute}; give (False,), (True,) or (False, True)"
            )

    def length_choices(self) -> tuple[tuple[int, ...], ...]:
        """Return the lengths to consider; a later choice counts only if no earlier is feasible."""
        if self.lengths:
            return (self.lengths,)
        # The first choice leaves the fewest slots idle.
        exact, *others = length_choices(self.num_ranks, self.slots_per_node)
        if self.stage_workers is not None:
            exact = tuple(sorted({*exact, len(self.stage_workers)}))
        return (exact, *others)

    def ranks_of(self, length: int) -> int:
        """Return the number of ranks that train in pipelines of a length."""
        return self.replicas_of(length) * sum(self.workers_of(length))

    def replicas_of(self, length: int) -> int:
        if self._is_shared(length):
            return 1
        room = replicas_of(length, self.num_ranks, self.slots_per_node)
        return room if self.max_replicas is None else min(room, self.max_replicas)

    def workers_of(self, length: int) -> tuple[int, ...]:
        return (self.stage_workers or ()) if self._is_shared(length) else (1,) * length

    def rings_of(self, length: int) -> tuple[Ring, ...]:
        """Return the ring over which each stage sums its gradients."""
        workers, num_replicas = self.workers_of(length), self.replicas_of(length)
        return rings_of(workers, num_replicas, self.num_ranks, self.slots_per_node)

    def schedules_of(self, length: int) -> tuple[str, ...]:
        """Return the schedules to consider; stages of several workers can run only 1F1B."""
        return self.schedules if max(self.workers_of(length)) == 1 else ("1f1b",)

    def _is_shared(self, length: int) -> bool:
        return self.stage_workers is not None and length == len(self.stage_workers)

    @property
    def most_replicas(self) -> int:
        """Return how many pipelines the batch can feed with a micro-batch each."""
        return math.ceil(self.global_batch / (self.micro_batch_size or 1))

    def samples_of(self, length: int) -> int:
        """Return the samples of the largest replica in a step."""
        # With a fixed size, whole micro-batches are shared out; one of them may be incomplete.
        unit = self.micro_batch_size or 1
        return min(
            self.global_batch, unit * math.ceil(self.most_replicas / self.replicas_of(length))
        )

    def sizes_of(self, length: int, num_micro_batches: int) -> tuple[int, ...]:
        """Return the sizes of the largest replica's micro-batches; a fixed size decides alone."""
        return micro_batch_sizes(
            self.samples_of(length), num_micro_batches, fixed_size=self.micro_batch_size
        )


def fitting_lengths(num_ranks: int, slots_per_node: int) -> tuple[int, ...]:
    """Return the lengths that leave no slot idle, in ascending order."""
    return length_choices(num_ranks, slots_per_node)[0]


def length_choices(num_ranks: int, slots_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths grouped by how many slots train, most first."""
    by_slots = defaultdict(list)
    for length in range(1, num_ranks + 1):
        if replicas := replicas_of(length, num_ranks, slots_per_node):
            by_slots[length * replicas].append(length)
    return tuple(tuple(by_slots[used]) for used in sorted(by_slots, reverse=True))


def replicas_of(length: int, num_ranks: int, slots_per_node: int) -> int:
    """Return how many pipelines of a length find room."""
    if length > slots_per_node and length % slots_per_node:
        return 0
    # A block is one node with several pipelines, or one pipeline over several nodes.
    block = max(length, slots_per_node)
    blocks, rest = divmod(num_ranks, block)
    return blocks * (block // length) + rest // length


# Cached, because every candidate of a length asks for the same rings.
@lru_cache(maxsize=1024)
def rings_of(
    workers: tuple[int, ...], num_replicas: int, num_ranks: int, slots_per_node: int
) -> tuple[Ring, ...]:
    """Return each stage's ring, of `workers` each; pipelines fill node after node."""
    length = sum(workers)
    block = max(length, slots_per_node)
    room = chain.from_iterable(
        range(start, min(start + block, num_ranks) - length + 1, length)
        for start in range(0, num_ranks, block)
    )
    pipelines = list(islice(room, num_replicas))
    nodes = [
        {(begin + rank) // slots_per_node for begin in pipelines for rank in range(first, last)}
        for first, last in pairwise(accumulate(workers, initial=0))
    ]
    # How many stages' rings leave each node, and so share its link.
    leaving = Counter(chain.from_iterable(own for own in nodes if len(own) > 1))
    return tuple(
        Ring(num_replicas * count, max(leaving[node] for node in own) if len(own) > 1 else 0)
        for count, own in zip(workers, nodes, strict=True)
    )

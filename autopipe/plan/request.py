"""State what is to be planned, and what a plan is.

Say which pipelines a cluster allows, and over which links their stages sum gradients.

A pipeline stays within a node, or fills whole ones. Where its length leaves a remainder, slots of
each node, or nodes, stay idle as spares. A stage's ring passes its ranks in ascending order, and
so leaves each of its nodes once:

    2 nodes of 4 slots, K = 2:        stage 0   0 2 | 4 6     two rings share each node's link
                                      stage 1   1 3 | 5 7
    likewise, at most 2 pipelines:    stage 0   0 2           none leaves its node
                                      stage 1   1 3
    stages of 3, 2 and 3 workers:     stage 0   0 1 2         stage 1 alone has the link
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
    """State a pipeline and what it is predicted to cost.

    Args:
        length: stages (K).
        boundaries: K + 1 indices over all sublayers; stage j trains boundaries[j] up to, but not
            with, boundaries[j + 1]; stage 0 also holds the frozen ones below boundaries[0].
        num_micro_batches: micro-batches of a replica's step (M).
        schedule: a name of `schedule.SCHEDULES`.
        peak_bytes: modelled bytes of each stage.
        fetch_s: those of the seconds in which stage 0 gets the step's samples behind the frozen
            prefix, or waits for those that are read ahead.
    """

    length: int
    boundaries: tuple[int, ...]
    num_micro_batches: int
    schedule: str
    predicted_step_s: float
    peak_bytes: tuple[int, ...]
    fetch_s: float = 0.0

    @property
    def training_s(self) -> float:
        """Return the predicted seconds of a step without fetching its samples."""
        return self.predicted_step_s - self.fetch_s

    def lengthened(self, factor: float) -> PipelinePlan:
        """Return the plan with a prediction in which all takes longer by a factor."""
        return replace(
            self,
            predicted_step_s=factor * self.predicted_step_s,
            fetch_s=factor * self.fetch_s,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> PipelinePlan:
        return PipelinePlan(**with_tuples(values))


@dataclass(frozen=True)
class PlanRequest:
    """State what is to be planned.

    Args:
        num_ranks: device slots that train.
        global_batch: samples of a step over all replicas.
        memory_limit_bytes: modelled bytes that a slot may hold; None for no limit.
        prefix_cached_s: seconds a sample to read the frozen prefix's activations; None where they
            are computed in each step.
        prefix_read_ahead: whether they are read while the step before computes: reading then takes
            time only where it takes longer than that step.
        prefix_chunk: samples the prefix runs at a time, the last chunk filled up; None for a
            micro-batch's.
        round_bytes: what a transition brings a rank at a time; 0 where none can come.
        lengths: pipeline lengths to consider; None for all that fit the cluster, those that leave
            slots idle only where no other is feasible.
        max_replicas: most pipelines that train side by side; None for no limit.
        stage_workers: of one pipeline of all ranks, the workers of each stage, which share its
            micro-batches. It takes the place of the pipelines of its length.
        micro_batches: micro-batch counts to consider; None for a sensible selection.
        micro_batch_size: where it is fixed, samples of every micro-batch but a batch's last;
            their number follows from it.
        schedules: schedules to consider; of two equally good ones the earlier is taken.
    Raises:
        ValueError: a count is out of range, a length does not fit the cluster, or a schedule is
            unknown.
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
                f"schedules {list(self.schedules)} are not all known; choose from "
                f"{list(SCHEDULES)}"
            )

    def length_choices(self) -> tuple[tuple[int, ...], ...]:
        """Return the lengths to consider: each choice for where none before it is feasible."""
        if self.lengths:
            return (self.lengths,)
        exact, *others = length_choices(self.num_ranks, self.slots_per_node)
        if self.stage_workers is not None:
            exact = tuple(sorted({*exact, len(self.stage_workers)}))
        return (exact, *others)

    def ranks_of(self, length: int) -> int:
        """Return how many ranks train in pipelines of a length."""
        return self.replicas_of(length) * sum(self.workers_of(length))

    def replicas_of(self, length: int) -> int:
        if self._is_shared(length):
            return 1
        room = replicas_of(length, self.num_ranks, self.slots_per_node)
        return room if self.max_replicas is None else min(room, self.max_replicas)

    def workers_of(self, length: int) -> tuple[int, ...]:
        return (self.stage_workers or ()) if self._is_shared(length) else (1,) * length

    def rings_of(self, length: int) -> tuple[Ring, ...]:
        """Return over which ranks and links each stage of a length sums its gradients."""
        workers, num_replicas = self.workers_of(length), self.replicas_of(length)
        return rings_of(workers, num_replicas, self.num_ranks, self.slots_per_node)

    def schedules_of(self, length: int) -> tuple[str, ...]:
        """Return the schedules to consider; stages of several workers have one alone."""
        return self.schedules if max(self.workers_of(length)) == 1 else ("1f1b",)

    def _is_shared(self, length: int) -> bool:
        return self.stage_workers is not None and length == len(self.stage_workers)

    @property
    def most_replicas(self) -> int:
        """Return how many pipelines the batch has something for."""
        return math.ceil(self.global_batch / (self.micro_batch_size or 1))

    def samples_of(self, length: int) -> int:
        """Return the samples of the largest replica in a step."""
        unit = self.micro_batch_size or 1
        return min(
            self.global_batch, unit * math.ceil(self.most_replicas / self.replicas_of(length))
        )

    def sizes_of(self, length: int, num_micro_batches: int) -> tuple[int, ...]:
        """Return the sizes of the largest replica's micro-batches.

        Args:
            num_micro_batches: how many they are, where their size is not fixed.
        """
        return micro_batch_sizes(
            self.samples_of(length), num_micro_batches, fixed_size=self.micro_batch_size
        )


def fitting_lengths(num_ranks: int, slots_per_node: int) -> tuple[int, ...]:
    """Return the lengths that leave no slot idle, in ascending order."""
    return length_choices(num_ranks, slots_per_node)[0]


def length_choices(num_ranks: int, slots_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths by how many slots train, most first.

    A later choice is for where no length of the ones before it is feasible.
    """
    by_slots = defaultdict(list)
    for length in range(1, num_ranks + 1):
        if replicas := replicas_of(length, num_ranks, slots_per_node):
            by_slots[length * replicas].append(length)
    return tuple(tuple(by_slots[used]) for used in sorted(by_slots, reverse=True))


def replicas_of(length: int, num_ranks: int, slots_per_node: int) -> int:
    """Return how many pipelines of a length find room; 0 where none does."""
    if length > slots_per_node and length % slots_per_node:
        return 0
    block = max(length, slots_per_node)
    blocks, rest = divmod(num_ranks, block)
    return blocks * (block // length) + rest // length


# Kept, because every candidate of a length asks for the same ones.
@lru_cache(maxsize=1024)
def rings_of(
    workers: tuple[int, ...], num_replicas: int, num_ranks: int, slots_per_node: int
) -> tuple[Ring, ...]:
    """Return each stage's ring; pipelines fill one node, or consecutive ones, after the other.

    Args:
        num_replicas: pipelines that train; the ranks of further ones are spares.
    """
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
    leaving = Counter(chain.from_iterable(own for own in nodes if len(own) > 1))
    return tuple(
        Ring(num_replicas * count, max(leaving[node] for node in own) if len(own) > 1 else 0)
        for count, own in zip(workers, nodes, strict=True)
    )

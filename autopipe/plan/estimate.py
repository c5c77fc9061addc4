"""Estimate a step's seconds and each stage's bytes, for a profile with some layers frozen.

Units are the active sublayers, counted from 0; a split is the K + 1 boundaries between them.
Stage 0 bears the frozen prefix besides its units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from operator import add

from autopipe.partition import PartCost, per_part
from autopipe.plan.request import PlanRequest
from autopipe.plan.simulation import Simulation, StageTimes, simulate
from autopipe.profile import Profile
from autopipe.schedule import Schedule


class StepModel:
    """Answer for any split, schedule and micro-batch sizes what a step costs.

    Args:
        profile: the measurements.
        request: what is planned.
    Raises:
        ValueError: nothing is left to train.
    """

    def __init__(self, profile: Profile, request: PlanRequest) -> None:
        num_frozen, round_bytes = request.num_frozen, request.round_bytes
        costs = profile.sublayers
        self.first_active = profile.first_active(num_frozen)
        self.num_units = len(costs) - self.first_active
        if self.num_units == 0:
            raise ValueError(
                f"{num_frozen} frozen layers leave none of {len(costs)} sublayers to "
                f"train; freeze at most {max((c.layer for c in costs), default=0)}"
            )
        self._profile, self._prefix_cached_s = profile, request.prefix_cached_s
        self._slots_per_node, self._prefix_chunk = request.slots_per_node, request.prefix_chunk
        self._workers_of = request.workers_of
        frozen, active = costs[: self.first_active], costs[self.first_active :]
        self._prefix_bytes = sum(cost.parameter_bytes + cost.buffer_bytes for cost in frozen)
        # Without gradients, activations are gone when the next sublayer has run.
        self._prefix_sample_bytes = max(
            (cost.saved_bytes + 2 * cost.output_bytes for cost in frozen), default=0.0
        )
        self._prefix_copies = max((cost.copy_bytes for cost in frozen), default=0)
        # A tensor larger than a round travels alone.
        self._round_bytes = round_bytes and max(
            round_bytes, *(cost.parameter_bytes for cost in costs)
        )
        self._gradients = _cumulate(cost.gradient_bytes for cost in active)
        self._held = _cumulate(
            cost.parameter_bytes + cost.optimizer_bytes + cost.buffer_bytes for cost in active
        )
        self._saved = _cumulate(cost.saved_bytes for cost in active)
        self._copies = _cumulate(cost.copy_bytes for cost in active)
        below = frozen[-1].output_bytes if frozen else 0.0
        self._boundary_bytes = [below, *(cost.output_bytes for cost in active)]
        self._work: dict[int, tuple[list[float], list[float]]] = {}

    def work_s(self, sizes: tuple[int, ...], length: int) -> PartCost:
        """Return the function that says how many seconds a stage of so many computes in a step.

        Where it has several workers, each computes so long.
        """
        total, fetch_s = [0.0] * (self.num_units + 1), self.fetch_s(sizes, length)
        for size, number in Counter(sizes).items():
            forward, backward = self._cumulated_work(size)
            total = [
                t + number * (f + b) for t, f, b in zip(total, forward, backward, strict=True)
            ]

        workers = self._workers_of(length)
        factors = [self._slowness(part, length) / workers[part] for part in range(length)]

        def cost(part: int, first: int, last: int) -> float:
            return factors[part] * (total[last] - total[first]) + (fetch_s if part == 0 else 0.0)

        return cost

    def fetch_s(self, sizes: tuple[int, ...], length: int) -> float:
        """Return the seconds in which stage 0 gets the step's samples behind the prefix.

        Several workers get those of their own micro-batches alone.
        """
        return self._fetch_all_s(sizes) / self._workers_of(length)[0]

    def _fetch_all_s(self, sizes: tuple[int, ...]) -> float:
        profile, num_samples = self._profile, sum(sizes)
        if self._prefix_cached_s is not None:
            return profile.cached_fetch_s + self._prefix_cached_s * num_samples
        chunk = self._prefix_chunk or max(sizes)
        one_s = sum(profile.frozen_s(index, chunk) for index in range(self.first_active))
        read_s = profile.fetch_s + profile.read_s * num_samples
        return read_s + math.ceil(num_samples / chunk) * one_s

    def stage_bytes(
        self, sizes: tuple[int, ...], in_flight: tuple[int, ...], *, num_replicas: int
    ) -> PartCost:
        """Return the function that says how many bytes a stage needs.

        In a step they are weights, gradients and optimizer state, the buckets in which replicas
        sum gradients, and for every micro-batch in flight what autograd saves, cast weights among
        it, and the activations at the stage's two ends; on stage 0 besides the frozen weights and
        what running them takes.
        In a transition a round of what arrives comes in the place of gradients and activations.
        Host memory is not counted: frozen layers' optimizer state, the cache, a checkpoint.

        Args:
            sizes: samples of every micro-batch.
            in_flight: each stage's most micro-batches between their forward and their backward.
            num_replicas: pipelines side by side.
        """
        num_samples = [max(sizes) * number for number in in_flight]
        workers = self._workers_of(len(in_flight))
        prefix_run = (self._prefix_chunk or max(sizes)) * self._prefix_sample_bytes
        prefix_run += self._prefix_copies
        if len(sizes) > 1:
            # All of the step's samples lie behind the prefix until their micro-batches' turn.
            prefix_run += sum(sizes) / workers[0] * self._boundary_bytes[0]

        def cost(part: int, first: int, last: int) -> float:
            held = self._held[last] - self._held[first] + (0 if part else self._prefix_bytes)
            copies = 2 if num_replicas * workers[part] > 1 else 1
            per_sample = (
                self._saved[last]
                - self._saved[first]
                + self._boundary_bytes[first]
                + self._boundary_bytes[last]
            )
            training = (
                copies * (self._gradients[last] - self._gradients[first])
                + num_samples[part] * per_sample
                + in_flight[part] * (self._copies[last] - self._copies[first])
                + (0 if part else prefix_run)
            )
            return math.ceil(held + max(training, min(held, self._round_bytes)))

        return cost

    def step_s(
        self,
        schedule: Schedule,
        sizes: tuple[int, ...],
        split: tuple[int, ...],
        *,
        num_replicas: int,
    ) -> float:
        """Predict the seconds of a step by executing its schedule."""
        return self.simulation(schedule, sizes, split).step_s + self._outside_schedule_s(
            split, num_replicas
        )

    def simulation(
        self, schedule: Schedule, sizes: tuple[int, ...], split: tuple[int, ...]
    ) -> Simulation:
        """Execute a schedule on a clock.

        Slots of a node may share its caches and its memory's bandwidth, so that a stage computes
        faster while others wait. How many wait follows from a first execution.
        """
        times = self._stage_times(sizes, split)
        slots, idle_node_share = self._slots_per_node, self._profile.idle_node_share
        workers = self._workers_of(len(split) - 1)
        simulation = simulate(schedule, times, replicas=workers)
        if len(schedule) == 1 or slots == 1 or idle_node_share == 1.0:
            return simulation
        computing = simulation.company / len(schedule)
        others = max(0.0, (computing * slots - 1) / (slots - 1))
        share = idle_node_share + (1 - idle_node_share) * others
        return simulate(schedule, times.scaled(share), replicas=workers)

    def least_step_s(
        self, sizes: tuple[int, ...], split: tuple[int, ...], *, num_replicas: int
    ) -> float:
        """Return seconds below which no schedule finishes a step; far cheaper than `step_s`.

        A stage does all its work between the first activation from below and the last gradient.
        """
        forward, backward = self._cumulated_work(min(sizes))
        fetch_s = self.fetch_s(sizes, len(split) - 1)
        below = [
            forward[unit] + backward[unit] + (fetch_s if unit else 0.0) for unit in split[:-1]
        ]
        busiest_s = max(map(add, per_part(self.work_s(sizes, len(split) - 1), split), below))
        return self._profile.idle_node_share * busiest_s + self._outside_schedule_s(
            split, num_replicas
        )

    def _outside_schedule_s(self, split: tuple[int, ...], num_replicas: int) -> float:
        """Return the seconds of all-reduce and optimizer on the largest stage, and of the rest."""
        profile, workers = self._profile, self._workers_of(len(split) - 1)
        trained_bytes = [
            self._gradients[last] - self._gradients[first] for first, last in pairwise(split)
        ]
        stage_s = max(
            profile.optimizer_s_per_byte * size + profile.all_reduce_s(num_replicas * count, size)
            for size, count in zip(trained_bytes, workers, strict=True)
        )
        return stage_s + profile.step_overhead_s

    def _stage_times(self, sizes: tuple[int, ...], split: tuple[int, ...]) -> StageTimes:
        work = [self._cumulated_work(size) for size in sizes]
        last_stage, workers = len(split) - 2, self._workers_of(len(split) - 1)
        factors = [self._slowness(stage, last_stage + 1) for stage in range(last_stage + 1)]
        # Pipelines begin at a node's first slot, so that the last slot's link leaves it.
        links = [
            self._profile.link if rank % self._slots_per_node else self._profile.node_link
            for rank in accumulate(workers[:-1])
        ]
        # Stage 0 also sends targets to the last stage.
        targets_s = links[-1].overhead_s if links else 0.0
        return StageTimes(
            forward_s=tuple(
                tuple(
                    factors[stage] * (forward[last] - forward[first])
                    + targets_s * (stage in (0, last_stage))
                    for forward, _ in work
                )
                for stage, (first, last) in enumerate(pairwise(split))
            ),
            backward_s=tuple(
                tuple(factors[stage] * (backward[last] - backward[first]) for _, backward in work)
                for stage, (first, last) in enumerate(pairwise(split))
            ),
            transfer_s=tuple(
                tuple(link.seconds(size * self._boundary_bytes[unit]) for size in sizes)
                for link, unit in zip(links, split[1:-1], strict=True)
            ),
            lead_s=(self.fetch_s(sizes, last_stage + 1), *(0.0,) * last_stage),
            handling_s=tuple(link.overhead_s for link in links),
        )

    def _slowness(self, stage: int, length: int) -> float:
        """Return how many times longer a stage takes on the slowest of its ranks."""
        workers = self._workers_of(length)
        if max(workers) == 1:
            return self._profile.slowness_of(stage, length)
        first = sum(workers[:stage])
        return max(self._profile.slowness[first : first + workers[stage]], default=1.0)

    def _cumulated_work(self, size: int) -> tuple[list[float], list[float]]:
        """Return the forward and backward seconds of the units below each index."""
        if size not in self._work:
            profile = self._profile
            active = range(self.first_active, len(profile.sublayers))
            self._work[size] = (
                _cumulate(profile.forward_s(index, size) for index in active),
                _cumulate(profile.backward_s(index, size) for index in active),
            )
        return self._work[size]


def _cumulate(values: Iterable[float]) -> list[float]:
    """Return the sums of the values before each index."""
    return list(accumulate(values, initial=0.0))

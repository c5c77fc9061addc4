"""Estimate a step's seconds and each stage's bytes, with some layers frozen.

Units are the active sublayers, counted from 0. A split is the K + 1 boundaries between them.
Stage 0 also has the frozen prefix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add

from autopipe.partition import PartCost, per_part
from autopipe.plan.request import PlanRequest
from autopipe.plan.simulation import Simulation, StageTimes, simulate
from autopipe.profile import Profile
from autopipe.schedule import peak_in_flight, schedule_of


class StepModel:
    """Price a step for any split, schedule and micro-batch sizes.

    Args:
        recomputes: whether active sublayers but the last run forward again in the backward.
    Raises:
        ValueError: nothing is left to train.
    """

    def __init__(
        self, profile: Profile, request: PlanRequest, *, recomputes: bool = False
    ) -> None:
        num_frozen, costs = request.num_frozen, profile.sublayers
        self.request, self._profile, self.recomputes = request, profile, recomputes
        self.first_active = profile.first_active(num_frozen)
        self.num_units = len(costs) - self.first_active
        if self.num_units == 0:
            raise ValueError(
                f"{num_frozen} frozen layers leave none of {len(costs)} sublayers to "
                f"train; freeze at most {max((c.layer for c in costs), default=0)}"
            )
        frozen, active = costs[: self.first_active], costs[self.first_active :]
        self._prefix_bytes = sum(cost.parameter_bytes + cost.buffer_bytes for cost in frozen)
        # Without gradients a sublayer's activations are freed once the next has run: take the
        # maximum, not the sum.
        self._prefix_sample_bytes = max(
            (cost.saved_bytes + 2 * cost.output_bytes for cost in frozen), default=0.0
        )
        self._prefix_copies = max((cost.copy_bytes for cost in frozen), default=0)
        # A tensor larger than a round travels alone.
        self._round_bytes = request.round_bytes and max(
            request.round_bytes, *(cost.parameter_bytes for cost in costs)
        )
        self._gradients = _cumulate(cost.gradient_bytes for cost in active)
        self._summed = _cumulate(cost.gradient_bytes - cost.untouched_bytes for cost in active)
        self._held = _cumulate(
            cost.parameter_bytes + cost.optimizer_bytes + cost.buffer_bytes for cost in active
        )
        below = frozen[-1].output_bytes if frozen else 0.0
        self._boundary_bytes = [below, *(cost.output_bytes for cost in active)]
        self._active, last = active, len(active) - 1
        self._repeats = [
            cost.recomputes or (recomputes and unit < last) for unit, cost in enumerate(active)
        ]
        kept = [
            (below, 0) if repeats else (cost.saved_bytes, cost.copy_bytes)
            for cost, repeats, below in zip(
                active, self._repeats, self._boundary_bytes, strict=False
            )
        ]
        self._saved = _cumulate(saved for saved, _ in kept)
        self._copies = _cumulate(copies for _, copies in kept)
        self._work: dict[int, tuple[list[float], list[float]]] = {}
        self._most_again: dict[int, list[list[float]]] = {}

    def work_s(self, sizes: tuple[int, ...], length: int) -> PartCost:
        """Return the function that prices a step's computing of each worker of a stage."""
        total, fetch_s = [0.0] * (self.num_units + 1), self.fetch_s(sizes, length)
        for size, number in Counter(sizes).items():
            forward, backward = self._cumulated_work(size)
            total = [
                t + number * (f + b) for t, f, b in zip(total, forward, backward, strict=True)
            ]
        workers = self.request.workers_of(length)
        factors = [self._slowness(part, length) / workers[part] for part in range(length)]

        def cost(part: int, first: int, last: int) -> float:
            return factors[part] * (total[last] - total[first]) + (fetch_s if part == 0 else 0.0)

        return cost

    def fetch_s(self, sizes: tuple[int, ...], length: int) -> float:
        """Return the seconds in which each worker of stage 0 gets its samples behind the prefix.

        Rows that are read ahead cost nothing here; `step_s` adds the wait for them.
        """
        profile, request, num_samples = self._profile, self.request, sum(sizes)
        if request.prefix_cached_s is not None:
            ahead = request.prefix_read_ahead
            read_s = 0.0 if ahead else request.prefix_cached_s * num_samples
            all_s = profile.cached_fetch_s + read_s
        else:
            chunk = request.prefix_chunk or max(sizes)
            one_s = profile.prefix_s(request.num_frozen, chunk)
            read_s = profile.fetch_s + profile.read_s * num_samples
            all_s = read_s + math.ceil(num_samples / chunk) * one_s
        return all_s / request.workers_of(length)[0]

    def stage_bytes(self, sizes: tuple[int, ...], length: int, schedule: str) -> PartCost:
        """Return the function that counts a stage's bytes.

        A step needs:
        - weights, gradients, optimizer state, and the buckets in which replicas sum gradients;
        - for every micro-batch in flight, what autograd saves (cast weights included) and the
          activations at the stage's two ends;
        - of sublayers that run forward again, their inputs instead, and for one micro-batch what
          autograd saves of the largest;
        - on stage 0 also the frozen weights, and the memory to run them.

        In a transition a round of arriving bytes replaces gradients and activations. Host memory
        is not counted: frozen layers' optimizer state, the cache, a checkpoint.
        """
        workers, num_replicas = self.request.workers_of(length), self.request.replicas_of(length)
        in_flight = _in_flight(schedule, workers, len(sizes))
        num_samples = [max(sizes) * number for number in in_flight]
        prefix_run = (self.request.prefix_chunk or max(sizes)) * self._prefix_sample_bytes
        prefix_run += self._prefix_copies
        if len(sizes) > 1:
            # The prefix runs for the whole step at once; its outputs wait for their micro-batch.
            prefix_run += sum(sizes) / workers[0] * self._boundary_bytes[0]

        again_bytes = self._again_bytes(max(sizes))

        def cost(part: int, first: int, last: int) -> float:
            held = self._held[last] - self._held[first] + (0 if part else self._prefix_bytes)
            copies = 2 if num_replicas * workers[part] > 1 else 1
            per_sample = (
                self._saved[last]
                - self._saved[first]
                # Of a first sublayer that runs again, the input is counted already.
                + (0.0 if self._repeats[first] else self._boundary_bytes[first])
                + self._boundary_bytes[last]
            )
            training = (
                copies * (self._gradients[last] - self._gradients[first])
                + num_samples[part] * per_sample
                + in_flight[part] * (self._copies[last] - self._copies[first])
                + again_bytes(first, last)
                + (0 if part else prefix_run)
            )
            return math.ceil(held + max(training, min(held, self._round_bytes)))

        return cost

    def _again_bytes(self, size: int) -> Callable[[int, int], float]:
        """Return the function that counts what a stage's forwards take while they run again."""
        if not any(self._repeats):
            return lambda first, last: 0.0
        if size not in self._most_again:
            one = [size * cost.saved_bytes + cost.copy_bytes for cost in self._active]
            again = [
                need if repeats else 0.0 for need, repeats in zip(one, self._repeats, strict=True)
            ]
            # The largest of units first .. first + n.
            self._most_again[size] = [
                list(accumulate(again[first:], max)) for first in range(len(again))
            ]
        most, top = self._most_again[size], self._active[-1]
        # What the last sublayer has saved is freed before the first forward runs again.
        freed = 0.0 if self._repeats[-1] else size * top.saved_bytes + top.copy_bytes

        def extra(first: int, last: int) -> float:
            ends = last == self.num_units
            return max(0.0, most[first][last - first - 1] - (freed if ends else 0.0))

        return extra

    def step_s(
        self, schedule: str, sizes: tuple[int, ...], split: tuple[int, ...]
    ) -> tuple[float, float]:
        """Predict the seconds of a step, and those in which stage 0 gets its samples.

        Reading ahead begins after a step's fetch, and must end before the next fetch:

            step     fetch t | computes t ........... | waits | fetch t + 1 | computes t + 1
            thread             reads t + 1 .................. |               reads t + 2
        """
        request, length = self.request, len(split) - 1
        fetch_s, ahead_s = self.fetch_s(sizes, length), 0.0
        if request.prefix_cached_s is not None and request.prefix_read_ahead:
            ahead_s = request.prefix_cached_s * sum(sizes) / request.workers_of(length)[0]
        alone_s = self.simulation(schedule, sizes, split).step_s + self._outside_schedule_s(split)
        waits_s = max(0.0, fetch_s + ahead_s - alone_s)
        return alone_s + waits_s, fetch_s + waits_s

    def simulation(
        self, schedule: str, sizes: tuple[int, ...], split: tuple[int, ...]
    ) -> Simulation:
        """Execute a schedule on a clock.

        Slots of a node may share caches and memory bandwidth, so that a stage computes faster
        while others wait. A first execution tells how many compute at the same time.
        """
        times, workers = self._stage_times(sizes, split), self.request.workers_of(len(split) - 1)
        slots, idle_node_share = self.request.slots_per_node, self._profile.idle_node_share
        program = schedule_of(schedule, workers, len(sizes))
        simulation = simulate(program, times, replicas=workers)
        if len(program) == 1 or slots == 1 or idle_node_share == 1.0:
            return simulation
        computing = simulation.company / len(program)
        others = max(0.0, (computing * slots - 1) / (slots - 1))
        share = idle_node_share + (1 - idle_node_share) * others
        return simulate(program, times.scaled(share), replicas=workers)

    def least_step_s(self, sizes: tuple[int, ...], split: tuple[int, ...]) -> float:
        """Return a lower bound of a step's seconds; far cheaper than `step_s`."""
        # A stage does all its work after the first activation from below has reached it, and the
        # last gradient must still pass all stages below.
        forward, backward = self._cumulated_work(min(sizes))
        fetch_s = self.fetch_s(sizes, len(split) - 1)
        below = [
            forward[unit] + backward[unit] + (fetch_s if unit else 0.0) for unit in split[:-1]
        ]
        busiest_s = max(map(add, per_part(self.work_s(sizes, len(split) - 1), split), below))
        return self._profile.idle_node_share * busiest_s + self._outside_schedule_s(split)

    def _outside_schedule_s(self, split: tuple[int, ...]) -> float:
        """Return the seconds of all-reduce and optimizer on the slowest stage, and overhead."""
        profile, rings = self._profile, self.request.rings_of(len(split) - 1)
        stage_s = max(
            profile.optimizer_s_per_byte * (self._gradients[last] - self._gradients[first])
            + profile.all_reduce_s(ring, self._summed[last] - self._summed[first])
            for (first, last), ring in zip(pairwise(split), rings, strict=True)
        )
        return stage_s + profile.step_overhead_s

    def _stage_times(self, sizes: tuple[int, ...], split: tuple[int, ...]) -> StageTimes:
        work = [self._cumulated_work(size) for size in sizes]
        last_stage, workers = len(split) - 2, self.request.workers_of(len(split) - 1)
        factors = [self._slowness(stage, last_stage + 1) for stage in range(last_stage + 1)]
        # Pipelines begin at a node's first slot, so that the last slot's link leaves it.
        links = [
            self._profile.link if rank % self.request.slots_per_node else self._profile.node_link
            for rank in accumulate(workers[:-1])
        ]
        # Stage 0 also sends targets to the last stage.
        targets_s = links[-1].overhead_s if links else 0.0
        # What each micro-batch costs besides is the larger, the more of them there are.
        python_s = self._profile.micro_batch_s / 2
        return StageTimes(
            forward_s=tuple(
                tuple(
                    factors[stage] * (forward[last] - forward[first])
                    + targets_s * (stage in (0, last_stage))
                    + python_s
                    for forward, _ in work
                )
                for stage, (first, last) in enumerate(pairwise(split))
            ),
            backward_s=tuple(
                tuple(
                    factors[stage] * (backward[last] - backward[first]) + python_s
                    for _, backward in work
                )
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
        ranks, workers = self._profile.slowness, self.request.workers_of(length)
        if max(workers) > 1:
            first = sum(workers[:stage])
            ranks = ranks[first : first + workers[stage]]
        elif len(ranks) % length == 0:
            # Rank = replica x length + stage. With a remainder it is not known here which ranks
            # are spares, so that all count.
            ranks = ranks[stage::length]
        return max(ranks, default=1.0)

    def _cumulated_work(self, size: int) -> tuple[list[float], list[float]]:
        """Return the forward and backward seconds of the units below each index."""
        if size not in self._work:
            profile = self._profile
            active = range(self.first_active, len(profile.sublayers))
            forward = [profile.forward_s(index, size) for index in active]
            # Measured backwards of a sublayer that repeats its forward itself contain it.
            again = [
                seconds if repeats and not cost.recomputes else 0.0
                for seconds, repeats, cost in zip(
                    forward, self._repeats, self._active, strict=True
                )
            ]
            backward = [profile.backward_s(index, size) for index in active]
            self._work[size] = _cumulate(forward), _cumulate(map(add, backward, again))
        return self._work[size]


# Cached, because each decision asks for the same schedules again.
@lru_cache(maxsize=1024)
def _in_flight(schedule: str, workers: tuple[int, ...], num_micro_batches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each stage keeps between forward and backward."""
    peaks = list(map(peak_in_flight, schedule_of(schedule, workers, num_micro_batches)))
    # The first of a stage's workers has the most micro-batches.
    return tuple(peaks[sum(workers[:stage])] for stage in range(len(workers)))


def _cumulate(values: Iterable[float]) -> list[float]:
    """Return the sums of the values before each index."""
    return list(accumulate(values, initial=0.0))

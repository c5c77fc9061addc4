"""Simulate pipelines of replicated stages on a clock, and find the one of the highest rate.

`optimize` takes a pipeline to be as fast as its slowest stage, and plans each server's inside
first. Here the schedule is run, and a stage may have any of all machines.

Weights of replicas are summed by a ring, which nothing hides; between two stages each pair of
workers has a link of its own. Rates are of a long stream without flushes: what a second one of
equal length adds to the first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopipe.pipedream.stage_search import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    StageSums,
    data_parallel_s,
    optimize,
)
from autopipe.plan import StageTimes, simulate
from autopipe.schedule import replicated_one_f_one_b, schedule_of

_STREAM = 6
"""Turns of a stream; in one each worker of the widest stage gets a minibatch."""
_MOST_LOOKED_AT, _MOST_SIMULATED = 5000, 20
"""Pipelines, begun or whole, after which a search ends without a proof."""

Stages = tuple[ReplicatedStage, ...]


class StageCosts:
    """Hold what a pipeline's stages cost for a minibatch, and the links between them.

    Args:
        stages: of the outermost level. Transfers out of one take the outer links.
        levels: of the cluster, innermost first.
    """

    def __init__(
        self,
        states: Sequence[CutState],
        stages: Sequence[ReplicatedStage],
        levels: Sequence[Machines],
    ) -> None:
        leaves = [leaf for stage in stages for leaf in stage.leaves]
        self.replicas = tuple(leaf.replicas for leaf in leaves)

        def own(upto: Sequence[float]) -> list[float]:
            return [
                upto[leaf.end - 1] - (upto[leaf.begin - 1] if leaf.begin else 0.0)
                for leaf in leaves
            ]

        self.forward_s = own([state.forward_s for state in states])
        self.backward_s = own([state.compute_s - state.forward_s for state in states])
        outer = {stage.end for stage in stages}
        self.transfer_s = [
            states[leaf.end - 1].crossing_bytes
            / levels[-1 if leaf.end in outer else 0].bytes_per_s
            for leaf in leaves[:-1]
        ]
        parameter_bytes = own([state.parameter_bytes for state in states])
        self.sync_s = [
            _sum_s(num_bytes, count, levels)
            for num_bytes, count in zip(parameter_bytes, self.replicas, strict=True)
        ]

    def flushed_s(self, schedule: str, num_micro_batches: int) -> float:
        """Return a minibatch's seconds in a pipeline that is empty behind it."""
        program = schedule_of(schedule, self.replicas, num_micro_batches)
        return simulate(program, self._times(num_micro_batches, 1 / num_micro_batches)).step_s

    def unflushed_s(self) -> float:
        """Return what a minibatch adds to a long stream of them, each whole."""
        turn = max(self.replicas)
        return (self._stream_s(2 * _STREAM, turn) - self._stream_s(_STREAM, turn)) / (
            _STREAM * turn * len(self.replicas)
        )

    def _stream_s(self, num_turns: int, turn: int) -> float:
        num = num_turns * turn * len(self.replicas)
        program = replicated_one_f_one_b(self.replicas, num, update_every=turn)
        # A worker sums once a turn for each of its own minibatches in it.
        update_s = tuple(
            seconds * turn / count
            for seconds, count in zip(self.sync_s, self.replicas, strict=True)
        )
        times = replace(self._times(num, 1.0), update_s=update_s)
        return simulate(program, times, replicas=self.replicas).step_s

    def _times(self, num: int, share: float) -> StageTimes:
        # Parts of a minibatch are taken to cost in proportion to their samples.
        return StageTimes(
            tuple((share * seconds,) * num for seconds in self.forward_s),
            tuple((share * seconds,) * num for seconds in self.backward_s),
            tuple((share * seconds,) * num for seconds in self.transfer_s),
        )


def _sum_s(num_bytes: float, replicas: int, levels: Sequence[Machines]) -> float:
    """Return the seconds to sum gradients; replicas beyond a server use the outer links."""
    rate = levels[0 if replicas <= levels[0].count else -1].bytes_per_s
    return 4 * (replicas - 1) * num_bytes / (rate * replicas)


def simulated_s(
    states: Sequence[CutState], stages: Sequence[ReplicatedStage], levels: Sequence[Machines]
) -> float:
    """Return the simulated seconds of a minibatch in a long stream; see `StageCosts`.

    Replicas of one stage sum their gradients level by level.
    """
    if len(stages) == 1 and len(stages[0].leaves) == 1:
        return data_parallel_s(states, levels)
    return StageCosts(states, stages, levels).unflushed_s()


def fastest_simulated(
    states: Sequence[CutState],
    levels: Sequence[Machines],
    *,
    workers: Sequence[int] | None = None,
    memory_bytes: float | None = None,
) -> ReplicatedPlan:
    """Return the pipeline of the highest simulated rate.

    Both choices of `optimize`, data parallelism, and pipelines of any stages over all machines
    compete, the latter in the order of a bound of their rate. The search ends when no other can be
    faster, or after some thousands. So the answer is never slower than what `optimize` chooses.

    Args:
        levels: of the cluster, innermost first.
        workers: of each stage, to cut the graph for these alone; None for any.
        memory_bytes: limit for a stage's stashed weights and activations on a machine.
    Raises:
        ValueError: as of `optimize`, or the graph cannot be cut for these workers.
    """
    num_machines = math.prod(level.count for level in levels)
    if workers is not None and sum(workers) != num_machines:
        raise ValueError(f"{workers} are not the workers of {num_machines} machines; give as many")
    rivals: list[Stages] = []
    if workers is None:
        rivals = [
            optimize(
                states, levels, activations=True, memory_bytes=memory_bytes, hidden_sums=hidden
            ).stages
            for hidden in (False, True)
        ]
        rivals.append((ReplicatedStage(0, len(states), num_machines),))
    best = min(
        ((simulated_s(states, stages, levels), stages) for stages in dict.fromkeys(rivals)),
        default=(math.inf, ()),
        key=lambda one: one[0],
    )
    seconds, stages = _Search(states, levels, workers, memory_bytes).faster_than(*best)
    if not stages:
        raise ValueError(f"no pipeline of {workers} workers fits; give others, or more memory")
    return ReplicatedPlan(stages, seconds, states[-1].compute_s, data_parallel_s(states, levels))


class _Search:
    """Try pipelines of stages over all machines, those of the lowest bound first.

    Legend: r workers of a stage; m machines of it and of all stages below; states as in
    `stage_search`. No pipeline is faster than

        a stage's compute and sums, shared by its workers
        a boundary's transfer, shared by all pairs of workers
        a minibatch's way up from a stage and back, over those that are in flight from there on
    """

    def __init__(
        self,
        states: Sequence[CutState],
        levels: Sequence[Machines],
        workers: Sequence[int] | None,
        memory_bytes: float | None,
    ) -> None:
        self._states, self._levels, self._memory_bytes = states, levels, memory_bytes
        self._num_machines = num = math.prod(level.count for level in levels)
        # The workers that the last stage of m machines may have.
        self._choices = {m: tuple(range(1, m + 1)) for m in range(1, num + 1)}
        if workers is not None:
            self._choices = {
                m: (r,) for m, r in zip(itertools.accumulate(workers), workers, strict=True)
            }
        sums = StageSums.of(states)
        parameters = np.where(np.isinf(sums.parameters), 0.0, sums.parameters)
        self._stage_s = np.stack(
            [(sums.compute + _sum_s(1.0, r, levels) * parameters) / r for r in range(1, num + 1)]
        )
        self._stashed = np.where(np.isinf(sums.saved), 0.0, sums.saved) + parameters
        self._transfer_s = sums.crossing / levels[-1].bytes_per_s
        self._below = [np.array(state.below, dtype=np.int64) for state in states]
        # The slowest stage of the best pipeline up to state j on m machines: [m, j].
        self._slowest_s = np.full((num + 1, len(states)), np.inf)
        for m, j in itertools.product(self._choices, range(len(states))):
            lower, last = self._below[j], np.array([r for r in self._choices[m] if r < m], int)
            if m in self._choices[m]:
                self._slowest_s[m, j] = self._stage_s[m - 1, 0, j]
            if len(lower) and len(last):
                stages = self._stage_s[last - 1][:, lower + 1, j]
                pipelines = np.maximum(self._slowest_s[m - last][:, lower], stages)
                self._slowest_s[m, j] = min(self._slowest_s[m, j], pipelines.min())

    def faster_than(self, seconds: float, stages: Stages) -> tuple[float, Stages]:
        """Return the fastest pipeline and its seconds; the given one if no other is faster."""
        # (bound of the whole, machines left, order of arrival, bound of its stages so far, they)
        heap: list[tuple[float, int, int, float, Stages]] = [(0.0, self._num_machines, 0, 0.0, ())]
        arrivals, num_simulated = itertools.count(1), 0
        for _ in range(_MOST_LOOKED_AT):
            if not heap or heap[0][0] >= seconds or num_simulated == _MOST_SIMULATED:
                break
            _, left, _, above_s, upper = heapq.heappop(heap)
            if not left:
                num_simulated += 1
                found_s = simulated_s(self._states, upper, self._levels)
                if found_s < seconds:
                    seconds, stages = found_s, upper
                continue
            for bound_s, own_s, stage in self._lower(left, upper):
                bound_s, own_s = max(bound_s, above_s), max(own_s, above_s)
                if bound_s < seconds:
                    item = (bound_s, left - stage.replicas, next(arrivals), own_s, (stage, *upper))
                    heapq.heappush(heap, item)
        return seconds, stages

    def _lower(self, m: int, upper: Stages) -> Iterator[tuple[float, float, ReplicatedStage]]:
        """Yield each next stage below the upper ones, with the whole's bound and its own."""
        end = upper[0].begin if upper else len(self._states)
        j, num_above = end - 1, self._num_machines - m
        sent_s = self._transfer_s[j] if upper else 0.0
        way_s = sum(float(self._transfer_s[stage.begin - 1]) for stage in upper)
        for r in self._choices[m]:
            # Cut -1 is the model's input.
            lower = np.array([-1]) if r == m else self._below[j]
            computed_s = self._states[-1].compute_s - np.array(
                [self._states[k].compute_s if k >= 0 else 0.0 for k in lower]
            )
            in_flight = r * ((num_above + r - 1) // r + 1)
            own_s = np.maximum(self._stage_s[r - 1, lower + 1, j], 0.0)
            if upper:
                own_s = np.maximum(own_s, sent_s / math.lcm(r, upper[0].replicas))
            own_s = np.maximum(own_s, (computed_s + 2 * way_s) / in_flight)
            if self._memory_bytes is not None:
                needed = math.ceil(num_above / r) * self._stashed[lower + 1, j]
                own_s = np.where(needed > self._memory_bytes, np.inf, own_s)
            rest_s = own_s if r == m else np.maximum(own_s, self._slowest_s[m - r, lower])
            for k, bound_s, least_s in zip(lower, rest_s, own_s, strict=True):
                yield float(bound_s), float(least_s), ReplicatedStage(int(k) + 1, end, r)

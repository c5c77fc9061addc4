"""Find the pipeline of replicated stages whose slowest stage is fastest, level by level.

Legend: states 0, 1, ... are the cuts of the graph; a stage (i, j) holds the nodes above cut i - 1
and below cut j; C(i, j) is its compute, P(i, j) its parameters' bytes, a(k) the bytes that cross
cut k, B a level's bandwidth, m machines of a level.

    one stage        A(i, j, m) = (C + 4 (m - 1) P / (B m inner)) / m
    a last stage     A(i, j, m) = min over k, m' of max(A(i, k, m - m'),
                                  (C(k+1, j) + 4 (m' - 1) P(k+1, j) / (B m')) / m',
                                  2 a(k) / (B m'), 2 a(j) / (B m'))
    the next level   C(i, j) := A(i, j, all machines of this level)

inner is the number of machines a level below, and 1 on the innermost. Transfers of activations
count only if asked for.

Source: PipeDream (SOSP 2019), section 3.1, as its program computes it: the program adds compute
and sums of gradients. With `hidden_sums` the larger one counts, as in the paper, which hides sums
behind compute. With parallel branches, a stage of a lower level may begin at a cut that does not
lie below its end; like the program, we price it by the same difference of sums.

Ours plans no stage without compute, such as one of dropouts that cost nothing: its machines would
be idle. The published program places such stages as relays where links are slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NO_WORK = 1e-12
"""A stage's share of the whole compute; less is no work, but a difference of rounded sums."""


@dataclass(frozen=True)
class CutState:
    """Describe a cut.

    Args:
        nodes: names of the nodes below it, in the graph's order.
        below: indices of the states that come before this one on some path of cuts.
        compute_s, saved_bytes, parameter_bytes: of all nodes below it.
        crossing_bytes: outputs that are still wanted above it.
        forward_s: the forward's part of compute_s.
    """

    nodes: tuple[str, ...]
    below: tuple[int, ...]
    compute_s: float
    saved_bytes: float
    parameter_bytes: float
    crossing_bytes: float
    forward_s: float


@dataclass(frozen=True)
class Machines:
    """Describe a level of a cluster.

    Args:
        count: machines; each holds all machines of the level below.
        bytes_per_s: between them.
    Raises:
        ValueError: there are none, or they are not connected.
    """

    count: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.count < 1 or not self.bytes_per_s > 0:
            raise ValueError(
                f"a level has {self.count} machines and {self.bytes_per_s} bytes/s; give at least "
                "one, and a rate above 0"
            )


@dataclass(frozen=True)
class ReplicatedStage:
    """State a stage.

    Args:
        begin, end: it holds states begin .. end - 1.
        replicas: machines of its level that run it in parallel.
        inner: its stages within each machine; () on the innermost level.
    """

    begin: int
    end: int
    replicas: int
    inner: tuple[ReplicatedStage, ...] = ()

    def nodes(self, states: Sequence[CutState]) -> set[str]:
        """Name its nodes."""
        below = states[self.begin - 1].nodes if self.begin else ()
        return set(states[self.end - 1].nodes) - set(below)

    @property
    def leaves(self) -> tuple[ReplicatedStage, ...]:
        """Return the innermost stages, with all their replicas."""
        if not self.inner:
            return (ReplicatedStage(self.begin, self.end, self.replicas),)
        return tuple(
            ReplicatedStage(leaf.begin, leaf.end, leaf.replicas * self.replicas)
            for stage in self.inner
            for leaf in stage.leaves
        )

    def to_json(self) -> list[int]:
        return [self.begin, self.end, self.replicas]


@dataclass(frozen=True)
class ReplicatedPlan:
    """State a pipeline of replicated stages.

    Args:
        stages: of the outermost level.
        seconds: per minibatch, of the slowest stage with all its replicas.
        single_machine_s: per minibatch, on one machine.
        data_parallel_s: per minibatch, with all machines as replicas of one stage.
    """

    stages: tuple[ReplicatedStage, ...]
    seconds: float
    single_machine_s: float
    data_parallel_s: float

    @property
    def leaves(self) -> tuple[ReplicatedStage, ...]:
        return tuple(leaf for stage in self.stages for leaf in stage.leaves)

    @property
    def name(self) -> str:
        """Return the replicas of all stages, such as "15-1"; or "straight" or "data parallel"."""
        replicas = [leaf.replicas for leaf in self.leaves]
        if len(replicas) == 1:
            return "data parallel"
        return "straight" if set(replicas) == {1} else "-".join(map(str, replicas))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.seconds,
            "stages": [stage.to_json() for stage in self.stages],
            "inner_stages": [leaf.to_json() for leaf in self.leaves],
            "single_machine_seconds": self.single_machine_s,
            "data_parallel_seconds": self.data_parallel_s,
            "over_data_parallel": self.data_parallel_s / self.seconds,
        }


def optimize(
    states: Sequence[CutState],
    levels: Sequence[Machines],
    *,
    activations: bool = False,
    memory_bytes: float | None = None,
    straight: bool = False,
    hidden_sums: bool = False,
) -> ReplicatedPlan:
    """Return the fastest pipeline.

    Args:
        levels: of the cluster, innermost first.
        activations: count the transfers of activations between stages.
        memory_bytes: limit for a stage's stashed weights and activations on a machine.
        straight: replicate no stage, and use all machines.
        hidden_sums: of compute and sums of gradients the larger one counts, not both.
    Raises:
        ValueError: there are no levels, nothing takes time, or no pipeline fits the memory.
    """
    if not levels:
        raise ValueError("there are no machines; give at least one level of them")
    if not states[-1].compute_s > 0:
        raise ValueError("no node of the graph takes any time; profile its compute")
    sums = StageSums.of(states)
    compute, inner = sums.compute, 1
    tables: list[_Level] = []
    for number, machines in enumerate(levels):
        is_last = number == len(levels) - 1
        level = _Level(
            sums, compute, machines, inner, activations, memory_bytes, straight, hidden_sums
        )
        # Nothing lies above the last level, which so needs only pipelines of the whole graph.
        level.solve(rows=1 if is_last else len(states))
        tables.append(level)
        # A stage of the next level computes as long as this level's best pipeline takes.
        compute, inner = level.best[-1], machines.count
    seconds = float(tables[-1].best[-1][0, -1])
    if not math.isfinite(seconds):
        if memory_bytes is not None:
            raise ValueError(f"no pipeline fits {memory_bytes:g} bytes on each machine")
        count = math.prod(machines.count for machines in levels)
        raise ValueError(f"the graph cannot be cut into {count} stages that all compute")
    return ReplicatedPlan(
        _stages(tables, 0, len(states) - 1),
        seconds,
        states[-1].compute_s,
        data_parallel_s(states, levels, hidden_sums=hidden_sums),
    )


def data_parallel_s(
    states: Sequence[CutState], levels: Sequence[Machines], *, hidden_sums: bool = False
) -> float:
    """Return the seconds of a minibatch if every machine holds the whole model."""
    seconds, inner = states[-1].compute_s, 1
    for level in levels:
        moved = 4 * (level.count - 1) * states[-1].parameter_bytes
        summed_s = moved / (level.bytes_per_s * level.count) / inner
        seconds = max(seconds, summed_s) if hidden_sums else seconds + summed_s
        seconds /= level.count
        inner = level.count
    return seconds


@dataclass(frozen=True)
class StageSums:
    """Hold the sums of any stage (i, j) as arrays [i, j], infinite for i > j.

    Compute is also infinite for stages without work. Crossing bytes are by state.
    """

    compute: Array
    parameters: Array
    saved: Array
    crossing: Array
    below: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(states: Sequence[CutState]) -> StageSums:
        num = len(states)

        def between(values: Sequence[float]) -> Array:
            upto = np.array(values, dtype=np.float64)
            sums: Array = upto[None, :] - np.concatenate([[0.0], upto[:-1]])[:, None]
            # Below the diagonal: a stage that ends before it begins.
            sums[np.tril_indices(num, -1)] = np.inf
            return sums

        compute = between([state.compute_s for state in states])
        compute[compute <= _NO_WORK * states[-1].compute_s] = np.inf
        return StageSums(
            compute,
            between([state.parameter_bytes for state in states]),
            between([state.saved_bytes for state in states]),
            np.array([state.crossing_bytes for state in states]),
            tuple(state.below for state in states),
        )


@dataclass
class _Level:
    """Solve a level for every stage of the level above; see `optimize` for the settings."""

    sums: StageSums
    compute: Array
    machines: Machines
    inner: int
    activations: bool
    memory_bytes: float | None
    straight: bool
    hidden_sums: bool
    best: Array = field(default_factory=lambda: np.empty((0, 0, 0)))

    def solve(self, rows: int) -> None:
        """Find A(i, j, m) for i < rows; store it as best[m - 1, i, j]."""
        num, count = len(self.sums.below), self.machines.count
        self.best = np.stack([self._single(m)[:rows] for m in range(1, count + 1)])
        for m in range(2, count + 1):
            for j in range(1, num):
                fastest = self._pipelines(j, m, slice(None)).min(axis=(0, 2))
                self.best[m - 1, :, j] = np.minimum(self.best[m - 1, :, j], fastest)

    def split(self, i: int, j: int, m: int) -> tuple[int, int] | None:
        """Return the best pipeline's last stage, as the state below it and its machines.

        None if a single stage is as fast.
        """
        wanted = self.best[m - 1, i, j]
        if m == 1 or not j or self._single(m)[i, j] <= wanted:
            return None
        fits = self._pipelines(j, m, slice(i, i + 1))[:, 0] <= wanted
        # Transposed: of equal pipelines the first cut wins, then the fewest machines.
        lower, last = np.argwhere(fits.T)[0]
        return self.sums.below[j][lower], int(last) + 1

    def _pipelines(self, j: int, m: int, rows: slice) -> Array:
        """Return the seconds of pipelines up to j on m machines.

        Dimensions: the last stage's machines, row i, the state below the last stage.
        """
        lower = np.array(self.sums.below[j])
        last = np.arange(1, 2 if self.straight else m)[:, None]
        # Reversed: the last stage on 1, 2, ... machines leaves m - 1, m - 2, ... to those before.
        before = self.best[: m - 1][::-1, rows, :][: len(last), :, lower]
        return np.maximum(before, self._last(lower, j, m, last)[:, None, :])

    def _single(self, m: int) -> Array:
        """Return the seconds of single stages on m machines."""
        sums = self.sums
        if self.straight and m > 1:
            return np.full_like(self.compute, np.inf)
        moved = 4 * (m - 1) * np.where(np.isinf(sums.parameters), 0.0, sums.parameters)
        synced_s = moved / (self.machines.bytes_per_s * m) / self.inner
        stash = math.ceil((self.machines.count - m) / m)
        return self._within(
            self._with_sums(self.compute, synced_s) / m, sums.saved + sums.parameters, stash
        )

    def _last(self, lower: NDArray[np.int64], j: int, m: int, last: NDArray[np.int64]) -> Array:
        """Return the seconds of last stages above each lower state, up to j, on `last` of m."""
        sums, rate = self.sums, self.machines.bytes_per_s * last
        compute, parameters = self.compute[lower + 1, j], sums.parameters[lower + 1, j]
        times = self._with_sums(compute, 4 * (last - 1) * parameters / rate) / last
        versions = np.ceil((self.machines.count - m) / last)
        times = self._within(times, sums.saved[lower + 1, j] + parameters, versions)
        if self.activations:
            times = np.maximum(times, 2 * sums.crossing[lower] / rate)
            if j < len(sums.below) - 1:  # Behind the last state nothing is sent.
                times = np.maximum(times, 2 * sums.crossing[j] / rate)
        return times

    def _with_sums(self, compute: Array, summed_s: Array) -> Array:
        both: Array = np.maximum(compute, summed_s) if self.hidden_sums else compute + summed_s
        return both

    def _within(self, times: Array, stashed: Array, versions: Array | int) -> Array:
        """Return the times, but infinity for stages whose stashed versions exceed the memory."""
        if self.memory_bytes is None:
            return times
        needed = versions * np.where(np.isinf(stashed), 0.0, stashed)
        return np.where(needed > self.memory_bytes, np.inf, times)


def _stages(levels: Sequence[_Level], i: int, j: int) -> tuple[ReplicatedStage, ...]:
    """Return the stages of the best pipeline of (i, j)."""
    if not levels:
        return ()
    *inner, own = levels
    found: list[ReplicatedStage] = []
    machines = own.machines.count
    while True:
        split = own.split(i, j, machines)
        begin, replicas = (i, machines) if split is None else (split[0] + 1, split[1])
        found.append(ReplicatedStage(begin, j + 1, replicas, _stages(inner, begin, j)))
        if split is None:
            return tuple(reversed(found))
        j, machines = split[0], machines - replicas

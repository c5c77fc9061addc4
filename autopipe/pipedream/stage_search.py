"""Find the pipeline of replicated stages whose slowest stage is fastest, level by level.

Legend: states 0, 1, ... are the cuts of the graph; a stage (i, j) has what lies between the cuts
before i and behind j; C(i, j) is its compute, P(i, j) its parameters' bytes, a(k) the bytes that
cross behind k, B a level's bandwidth, m machines of a level.

    one stage        A(i, j, m) = (C + 4 (m - 1) P / (B m inner)) / m
    a last stage     A(i, j, m) = min over k, m' of max(A(i, k, m - m'),
                                  (C(k+1, j) + 4 (m' - 1) P(k+1, j) / (B m')) / m',
                                  2 a(k) / (B m'), 2 a(j) / (B m'))
    the next level   C(i, j) := A(i, j, all machines of this level)

inner is the number of machines a level below, and 1 on the innermost. The transfers of activations
count where they are asked for.

Source: PipeDream (SOSP 2019), section 3.1, as its program computes it: the paper takes the larger
of compute and sums of gradients where the program adds them, and hides transfers. Where branches
run side by side, a stage of a lower level may begin at a cut that does not lie below its end; the
program counts it by the same difference of sums, and so do we.

Ours plans no stage without compute, as of dropouts that cost nothing: its machines would be idle.
The published program places such stages where links are slow, as relays of several machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.pipedream.cuts import CutState

Array = NDArray[np.float64]

_NO_WORK = 1e-12
"""Of the whole compute: differences of its sums below that are rounding, or none."""


@dataclass(frozen=True)
class Machines:
    """Describe a level of a cluster.

    Args:
        count: machines, each of the level below.
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
        begin, end: states begin..end-1.
        replicas: machines of its level that run it side by side.
        inner: its stages within such a machine; () on the innermost level.
    """

    begin: int
    end: int
    replicas: int
    inner: tuple[ReplicatedStage, ...] = ()

    def nodes(self, states: Sequence[CutState]) -> set[str]:
        """Name the nodes that lie between its cuts."""
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
        seconds: of a minibatch on the slowest stage, over its replicas.
        single_machine_s: of a minibatch on one machine.
        data_parallel_s: of a minibatch where all machines are replicas of one stage.
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
        """Return the replicas of all stages, as "15-1", or "straight" or "data parallel"."""
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
) -> ReplicatedPlan:
    """Return the fastest pipeline.

    Args:
        levels: of the cluster, innermost first.
        activations: count the transfers of activations between stages.
        memory_bytes: that the stashed weights and activations of a stage may take on a machine.
        straight: replicate no stage; then no machine stays idle either.
    Raises:
        ValueError: there are no levels, nothing takes time, or no pipeline fits the memory.
    """
    if not levels:
        raise ValueError("there are no machines; give at least one level of them")
    if not states[-1].compute_s > 0:
        raise ValueError("no node of the graph takes any time; profile its compute")
    sums = _Sums.of(states)
    compute, inner = sums.compute, 1
    tables: list[_Level] = []
    for number, machines in enumerate(levels):
        is_last = number == len(levels) - 1
        limits = _Limits(activations, memory_bytes, straight)
        level = _Level(sums, compute, machines, inner, limits)
        level.solve(rows=1 if is_last else len(states))
        tables.append(level)
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
        data_parallel_s(states, levels),
    )


def data_parallel_s(states: Sequence[CutState], levels: Sequence[Machines]) -> float:
    """Return the seconds of a minibatch where every machine holds the whole model."""
    seconds, inner = states[-1].compute_s, 1
    for level in levels:
        moved = 4 * (level.count - 1) * states[-1].parameter_bytes
        seconds = (seconds + moved / (level.bytes_per_s * level.count) / inner) / level.count
        inner = level.count
    return seconds


@dataclass(frozen=True)
class _Sums:
    """Hold what lies between any two states: [i, j] from behind i - 1 to j; infinite for none.

    Compute is infinite, too, where there is none to do.
    """

    compute: Array
    parameters: Array
    saved: Array
    crossing: Array
    below: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(states: Sequence[CutState]) -> _Sums:
        num = len(states)

        def between(values: Sequence[float]) -> Array:
            upto = np.array(values, dtype=np.float64)
            found: Array = upto[None, :] - np.concatenate([[0.0], upto[:-1]])[:, None]
            found[np.tril_indices(num, -1)] = np.inf
            return found

        compute = between([state.compute_s for state in states])
        compute[compute <= _NO_WORK * states[-1].compute_s] = np.inf
        return _Sums(
            compute,
            between([state.parameter_bytes for state in states]),
            between([state.saved_bytes for state in states]),
            np.array([state.crossing_bytes for state in states]),
            tuple(state.below for state in states),
        )


@dataclass(frozen=True)
class _Limits:
    """Say what counts, and what is allowed; see `optimize`."""

    activations: bool
    memory_bytes: float | None
    straight: bool


class _Level:
    """Solve a level for every stage of the one above."""

    def __init__(
        self, sums: _Sums, compute: Array, machines: Machines, inner: int, limits: _Limits
    ) -> None:
        self._sums, self._compute, self._limits = sums, compute, limits
        self.count, self._bytes_per_s, self._inner = machines.count, machines.bytes_per_s, inner
        self.best: Array = np.empty((0, 0, 0))

    def solve(self, rows: int) -> None:
        """Find A(i, j, m) for i below `rows`; `best[m - 1]` then holds those of m machines."""
        num = len(self._sums.below)
        self.best = np.stack([self._single(m)[:rows] for m in range(1, self.count + 1)])
        for m in range(2, self.count + 1):
            for j in range(1, num):
                found = self._pipelines(j, m, slice(None)).min(axis=(0, 2))
                self.best[m - 1, :, j] = np.minimum(self.best[m - 1, :, j], found)

    def split(self, i: int, j: int, m: int) -> tuple[int, int] | None:
        """Return behind which state, and with how many machines, the last stage of the best
        pipeline is; None where one stage is as fast.
        """
        wanted = self.best[m - 1, i, j]
        if m == 1 or not j or self._single(m)[i, j] <= wanted:
            return None
        fits = self._pipelines(j, m, slice(i, i + 1))[:, 0] <= wanted
        lower, last = np.argwhere(fits.T)[0]
        return self._sums.below[j][lower], int(last) + 1

    def _pipelines(self, j: int, m: int, rows: slice) -> Array:
        """Return the seconds of pipelines to j on m machines: (last stage's, row, lower state)."""
        lower = np.array(self._sums.below[j])
        last = np.arange(1, 2 if self._limits.straight else m)[:, None]
        before = self.best[: m - 1][::-1, rows, :][: len(last), :, lower]
        return np.maximum(before, self._last(lower, j, m, last)[:, None, :])

    def _single(self, m: int) -> Array:
        sums = self._sums
        if self._limits.straight and m > 1:
            return np.full_like(self._compute, np.inf)
        moved = 4 * (m - 1) * np.where(np.isinf(sums.parameters), 0.0, sums.parameters)
        synced_s = moved / (self._bytes_per_s * m) / self._inner
        stash = math.ceil((self.count - m) / m)
        return self._within((self._compute + synced_s) / m, sums.saved + sums.parameters, stash)

    def _last(self, lower: NDArray[np.int64], j: int, m: int, last: NDArray[np.int64]) -> Array:
        """Return the seconds of a last stage behind each lower state to j, on `last` of m."""
        sums, rate = self._sums, self._bytes_per_s * last
        compute, parameters = self._compute[lower + 1, j], sums.parameters[lower + 1, j]
        times: Array = (compute + 4 * (last - 1) * parameters / rate) / last
        versions = np.ceil((self.count - m) / last)
        times = self._within(times, sums.saved[lower + 1, j] + parameters, versions)
        if self._limits.activations:
            times = np.maximum(times, 2 * sums.crossing[lower] / rate)
            if j < len(sums.below) - 1:
                times = np.maximum(times, 2 * sums.crossing[j] / rate)
        return times

    def _within(self, times: Array, stashed: Array, versions: Array | int) -> Array:
        """Return infinity where a stage's versions do not fit the memory."""
        if self._limits.memory_bytes is None:
            return times
        needed = versions * np.where(np.isinf(stashed), 0.0, stashed)
        return np.where(needed > self._limits.memory_bytes, np.inf, times)


def _stages(levels: Sequence[_Level], i: int, j: int) -> tuple[ReplicatedStage, ...]:
    """Return the stages of the best pipeline from behind state i - 1 to j."""
    if not levels:
        return ()
    *inner, own = levels
    found: list[ReplicatedStage] = []
    machines = own.count
    while True:
        split = own.split(i, j, machines)
        begin, replicas = (i, machines) if split is None else (split[0] + 1, split[1])
        found.append(ReplicatedStage(begin, j + 1, replicas, _stages(inner, begin, j)))
        if split is None:
            return tuple(reversed(found))
        j, machines = split[0], machines - replicas

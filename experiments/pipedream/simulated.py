"""Predict every way to share a model's work, from a profile of its layers, on a described cluster.

A minibatch's parts are taken to cost in proportion to their samples. Weights of replicas are
summed by a ring, which nothing hides; between two stages each pair of workers has a link of its
own. Rates are of a long stream: what a second one of equal length adds to the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.pipedream import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)
from autopipe.plan import StageTimes, simulate
from autopipe.schedule import replicated_one_f_one_b, schedule_of
from experiments.pipedream.cuts import cut_states
from experiments.pipedream.layer_graph import LayerGraph

NUM_MICRO_BATCHES = 8
_STREAM = 6
"""Batches of a stream."""


@dataclass(frozen=True)
class Predicted:
    """Hold a way's seconds a minibatch.

    Args:
        name: of the way.
        seconds: of a minibatch, on the whole cluster.
        plan: the stages' replicas.
    """

    name: str
    seconds: float
    plan: str


def predict(
    graph: LayerGraph, levels: Sequence[Machines], published: Sequence[int] | None = None
) -> list[Predicted]:
    """Return every way's seconds; data parallelism, the others' measure, comes first.

    Args:
        graph: what each layer costs.
        levels: of the cluster, innermost first.
        published: replicas of two stages that were chosen elsewhere; cut where they are fastest.
    Returns:
        the fastest as simulated comes last; no other row is faster.
    """
    states = cut_states(graph)
    sync_s = data_parallel_s(states, levels)
    num_machines = math.prod(level.count for level in levels)
    rows = [
        Predicted("data parallel", sync_s, str(num_machines)),
        Predicted("one machine", states[-1].compute_s, "1"),
    ]
    straight = _straight(states, levels)
    if straight is not None:
        stages = _Stages(graph, states, straight, levels)
        name = f"straight, {len(straight.leaves)}"
        micro = NUM_MICRO_BATCHES
        rows += [
            Predicted("model parallel", stages.flushed_s("gpipe", 1), name),
            Predicted("GPipe", stages.flushed_s("gpipe", micro), name),
            Predicted("1F1B", stages.flushed_s("1f1b", micro), name),
            Predicted("async 1F1B", stages.unflushed_s(), name),
        ]
    for name, hidden_sums in (("optimizer's choice", False), ("paper's rule", True)):
        choice = optimize(states, levels, activations=True, hidden_sums=hidden_sums)
        seconds = sync_s
        if choice.name != "data parallel":
            seconds = _Stages(graph, states, choice, levels).unflushed_s()
        rows.append(Predicted(name, seconds, choice.name))
    if published is not None and len(published) == 2:
        rows.append(
            Predicted(
                "published choice",
                _fastest_cut_s(graph, states, levels, published, math.inf),
                "-".join(map(str, published)),
            )
        )
    rows.append(_fastest(graph, states, levels, rows))
    return rows


def _fastest(
    graph: LayerGraph,
    states: Sequence[CutState],
    levels: Sequence[Machines],
    rows: Sequence[Predicted],
) -> Predicted:
    """Return the fastest as simulated: of the other ways, and of all machines in two stages."""
    best = min(rows, key=lambda row: row.seconds)
    num_machines = math.prod(level.count for level in levels)
    for first in range(1, num_machines):
        replicas = (first, num_machines - first)
        seconds = _fastest_cut_s(graph, states, levels, replicas, best.seconds)
        if seconds < best.seconds:
            best = Predicted("", seconds, "-".join(map(str, replicas)))
    return replace(best, name="fastest simulated")


def _fastest_cut_s(
    graph: LayerGraph,
    states: Sequence[CutState],
    levels: Sequence[Machines],
    replicas: Sequence[int],
    limit_s: float,
) -> float:
    """Return the seconds of two stages, cut where they are fastest; infinite above a limit."""
    whole_s, best_s = states[-1].compute_s, limit_s
    bounds = [
        (max(below.compute_s / replicas[0], (whole_s - below.compute_s) / replicas[1]), cut)
        for cut, below in enumerate(states[:-1], start=1)
    ]
    for bound_s, cut in sorted(bounds):
        if bound_s >= best_s:  # No stage takes less than its compute.
            break
        stages = _Stages(graph, states, _in_two(replicas, cut, len(states)), levels)
        best_s = min(best_s, stages.unflushed_s())
    return best_s if best_s < limit_s else math.inf


def _in_two(replicas: Sequence[int], cut: int, num_states: int) -> ReplicatedPlan:
    stages = (
        ReplicatedStage(0, cut, replicas[0]),
        ReplicatedStage(cut, num_states, replicas[1]),
    )
    return ReplicatedPlan(stages, math.nan, math.nan, math.nan)


def _straight(states: Sequence[CutState], levels: Sequence[Machines]) -> ReplicatedPlan | None:
    """Return the best pipeline of single machines, of as many as the graph can be cut for."""
    try:
        return optimize(states, levels, activations=True, straight=True)
    except ValueError:
        return None


class _Stages:
    """Hold a plan's stages, their costs for a minibatch, and the links between them."""

    def __init__(
        self,
        graph: LayerGraph,
        states: Sequence[CutState],
        plan: ReplicatedPlan,
        levels: Sequence[Machines],
    ) -> None:
        nodes = {node.name: node for node in graph.nodes}
        leaves = plan.leaves
        self.replicas = tuple(leaf.replicas for leaf in leaves)
        own = [leaf.nodes(states) for leaf in leaves]
        self.forward_s = [sum(nodes[name].forward_s for name in names) for names in own]
        self.backward_s = [sum(nodes[name].backward_s for name in names) for names in own]
        outer = {stage.end for stage in plan.stages}
        rates = [levels[-1 if leaf.end in outer else 0].bytes_per_s for leaf in leaves[:-1]]
        self.transfer_s = [
            states[leaf.end - 1].crossing_bytes / rate
            for leaf, rate in zip(leaves[:-1], rates, strict=True)
        ]
        self.sync_s = [
            self._sum_s(sum(nodes[name].parameter_bytes for name in names), count, levels)
            for names, count in zip(own, self.replicas, strict=True)
        ]

    @staticmethod
    def _sum_s(num_bytes: float, replicas: int, levels: Sequence[Machines]) -> float:
        """Return the seconds to sum gradients; replicas beyond a server use the outer links."""
        rate = levels[0 if replicas <= levels[0].count else -1].bytes_per_s
        return 4 * (replicas - 1) * num_bytes / (rate * replicas)

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
        return StageTimes(
            tuple((share * seconds,) * num for seconds in self.forward_s),
            tuple((share * seconds,) * num for seconds in self.backward_s),
            tuple((share * seconds,) * num for seconds in self.transfer_s),
        )

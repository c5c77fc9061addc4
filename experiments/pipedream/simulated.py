"""Predict every way to share a model's work, from a profile of its layers, on a described cluster.

`autopipe.pipedream` runs the schedules on a clock; see its `StageCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.pipedream import (
    CutState,
    Machines,
    ReplicatedPlan,
    StageCosts,
    data_parallel_s,
    fastest_simulated,
    optimize,
    simulated_s,
)
from experiments.pipedream.cuts import cut_states
from experiments.pipedream.layer_graph import LayerGraph

NUM_MICRO_BATCHES = 8


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
        published: replicas of stages that were chosen elsewhere; cut where they are fastest.
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
        stages = StageCosts(states, straight.stages, levels)
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
        seconds = simulated_s(states, choice.stages, levels)
        rows.append(Predicted(name, seconds, choice.name))
    fastest = fastest_simulated(states, levels)
    if published:
        named = fastest_simulated(states, levels, workers=published)
        rows.append(Predicted("published choice", named.seconds, named.name))
    best = min([Predicted("", fastest.seconds, fastest.name), *rows], key=lambda row: row.seconds)
    return [*rows, replace(best, name="fastest simulated")]


def _straight(states: Sequence[CutState], levels: Sequence[Machines]) -> ReplicatedPlan | None:
    """Return the best pipeline of single machines, of as many as the graph can be cut for."""
    try:
        return optimize(states, levels, activations=True, straight=True)
    except ValueError:
        return None

"""Plan as PipeDream does: stages of a layer graph, each with its own number of replicas.

profile's layer_graph ─► states: places where the graph can be cut, in order ─► optimizer
"""

from autopipe.pipedream.optimizer import (
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)
from autopipe.pipedream.states import CutState, cut_states, left_out, trimmed

__all__ = [
    "CutState", "Machines", "ReplicatedPlan", "ReplicatedStage", "cut_states",
    "data_parallel_s", "left_out", "optimize", "trimmed",
]  # fmt: skip

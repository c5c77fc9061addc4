"""Plan as PipeDream does: stages of a layer graph, each with its own number of replicas.

profile's layer_graph ─► cuts: places where it can be cut, in order ─► stage_search
"""

from autopipe.pipedream.cuts import CutState, cut_states, left_out, trimmed
from autopipe.pipedream.stage_search import (
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)

__all__ = [
    "CutState", "Machines", "ReplicatedPlan", "ReplicatedStage", "cut_states",
    "data_parallel_s", "left_out", "optimize", "trimmed",
]  # fmt: skip

"""Plan as PipeDream does: stages of a layer graph, each with its own number of replicas.

profile's layer_graph ─► cuts: places where it can be cut, in order ─► stage_search
plan's request ─► request_plan: the same for a run's request
"""

from autopipe.pipedream.cuts import CutState, cut_states, trimmed
from autopipe.pipedream.request_plan import pipedream_stages, plan_as_pipedream, question_of
from autopipe.pipedream.stage_search import (
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)

__all__ = [
    "CutState", "Machines", "ReplicatedPlan", "ReplicatedStage", "cut_states",
    "data_parallel_s", "optimize", "pipedream_stages", "plan_as_pipedream",
    "question_of", "trimmed",
]  # fmt: skip

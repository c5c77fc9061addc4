"""Plan as PipeDream does: stages of a chain or graph, each with its own number of replicas.

stage_search: over the places where a model can be cut
request_plan: the same for a run's request
"""

from autopipe.pipedream.request_plan import pipedream_stages, plan_as_pipedream, question_of
from autopipe.pipedream.stage_search import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)

__all__ = [
    "CutState", "Machines", "ReplicatedPlan", "ReplicatedStage", "data_parallel_s", "optimize",
    "pipedream_stages", "plan_as_pipedream", "question_of",
]  # fmt: skip

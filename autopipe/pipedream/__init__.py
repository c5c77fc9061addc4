"""Plan as PipeDream does: stages of a chain or graph, each with its own number of replicas.

stage_search: over the places where a model can be cut, by formula
simulated_rate: by running the schedule
request_plan: the same for a run's request
"""

from autopipe.pipedream.request_plan import (
    choose,
    pipedream_stages,
    plan_as_pipedream,
    question_of,
)
from autopipe.pipedream.simulated_rate import StageCosts, fastest_simulated, simulated_s
from autopipe.pipedream.stage_search import (
    CutState,
    Machines,
    ReplicatedPlan,
    ReplicatedStage,
    data_parallel_s,
    optimize,
)

__all__ = [
    "CutState", "Machines", "ReplicatedPlan", "ReplicatedStage", "StageCosts", "choose",
    "data_parallel_s", "fastest_simulated", "optimize", "pipedream_stages", "plan_as_pipedream",
    "question_of", "simulated_s",
]  # fmt: skip

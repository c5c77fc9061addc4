"""Decide at a step boundary, write it down, and carry it out.

observer ─► elasticity ─► decision ─► journal: written down, and told
                │ └─► planner ─► costs; planners: which pipeline
                └───► deployment ─► shards: who holds what, and how it moves
"""

from pipetransformer.elastic.decision import Change, Decision
from pipetransformer.elastic.deployment import Deployment
from pipetransformer.elastic.elasticity import Elasticity
from pipetransformer.elastic.journal import plan_shape
from pipetransformer.elastic.observer import PROBE_FOLDER, read_looks
from pipetransformer.elastic.planners import (
    PlanSituation,
    complete_request,
    fastest_per_sample,
    fastest_plan,
    published_plan,
)
from pipetransformer.elastic.shards import (
    OPTIMIZER,
    UNTRAINED,
    WEIGHTS,
    shard_name,
    split_by_change,
    split_shard_name,
)

__all__ = [
    "Change", "Decision", "Deployment", "OPTIMIZER", "PROBE_FOLDER", "PlanSituation",
    "Elasticity", "UNTRAINED", "WEIGHTS", "complete_request", "fastest_per_sample",
    "fastest_plan", "plan_shape", "published_plan",
    "read_looks", "shard_name", "split_by_change", "split_shard_name",
]  # fmt: skip

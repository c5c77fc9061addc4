"""Decide at a step boundary, write it down, and carry it out.

transitions ─► decider ─► decision ─► journal
     │           └─► run_planner ─► costs: what steps and transitions take
     └───────► deployment ─► ownership, held_shards
"""

from pipetransformer.transition.decider import plan_shape
from pipetransformer.transition.decision import Decision
from pipetransformer.transition.deployment import Deployment
from pipetransformer.transition.ownership import OPTIMIZER, WEIGHTS, shard_name, split_shard_name
from pipetransformer.transition.transitions import Change, Transitions

__all__ = [
    "Change", "Decision", "Deployment", "OPTIMIZER", "Transitions",
    "WEIGHTS", "plan_shape", "shard_name", "split_shard_name",
]  # fmt: skip

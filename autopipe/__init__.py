"""Run micro-batch pipelines, and choose them: schedules, engine, profile, partition, plan."""

from autopipe.engine import StageLinks, StageReport, StageWork, run_program
from autopipe.link import LinkError, Peer, Receiver, Sender, TensorSpec
from autopipe.partition import min_max_partition
from autopipe.plan import PipelinePlan, PlanRequest, candidates, plan_pipeline, predict
from autopipe.profile import LinkCost, Profile, ProfiledSublayer, SublayerCost, profile_sublayers
from autopipe.profile import merge as merge_profiles
from autopipe.schedule import (
    SCHEDULES,
    Instruction,
    Op,
    Schedule,
    draw,
    forward_only,
    gpipe,
    one_f_one_b,
)
from autopipe.simulate import Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Instruction",
    "LinkCost",
    "LinkError",
    "Op",
    "Peer",
    "PipelinePlan",
    "PlanRequest",
    "Profile",
    "ProfiledSublayer",
    "Receiver",
    "Schedule",
    "Sender",
    "Simulation",
    "StageLinks",
    "StageReport",
    "StageWork",
    "SublayerCost",
    "TensorSpec",
    "candidates",
    "draw",
    "forward_only",
    "gpipe",
    "merge_profiles",
    "min_max_partition",
    "one_f_one_b",
    "plan_pipeline",
    "predict",
    "profile_sublayers",
    "run_program",
    "simulate",
]

"""Predict steps by simulating their schedules, and choose a pipeline by the predictions.

request ─► search ─► estimate ─► simulation
             └─ explanation       paper_rules: as published, for comparison
"""

from autopipe.plan.explanation import ExplainedPlan, confidence, explain, runners_up
from autopipe.plan.paper_rules import (
    best_first,
    plan_as_published,
    published_length,
    published_split,
    throughput_table,
)
from autopipe.plan.request import PipelinePlan, PlanRequest, fitting_lengths
from autopipe.plan.search import (
    AS_FAST,
    candidates,
    least_memory_plan,
    near_fastest,
    plan_pipeline,
    predict,
    stage_compute_s,
    step_range,
)
from autopipe.plan.simulation import Simulation, StageTimes, simulate

__all__ = [
    "AS_FAST", "ExplainedPlan", "PipelinePlan", "PlanRequest", "Simulation", "StageTimes",
    "best_first", "candidates", "confidence", "explain", "fitting_lengths",
    "least_memory_plan", "near_fastest", "plan_as_published", "plan_pipeline", "predict",
    "published_length", "published_split", "runners_up", "simulate", "stage_compute_s",
    "step_range", "throughput_table",
]  # fmt: skip

"""Prove that a pipeline is changed only where that pays, or where it can no longer stay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from autopipe import LinkCost, PipelinePlan, PlanRequest, Profile, plan_pipeline, predict
from autopipe.profile import SublayerCost
from pipetransformer import PlanSituation, fastest_plan
from pipetransformer.planning import fastest_per_sample

FREE = LinkCost(0.0, math.inf)


def profile(num_sublayers: int = 4, **changes: Any) -> Profile:
    """Cost 1 s forward and 2 s backward a sample; 100 parameter bytes, 400 with all it takes."""
    sublayers = tuple(SublayerCost(f"layer {i}", i, (1.0,), (2.0,), (0.5,), 100, 0, 0.0, 0.0)
                      for i in range(num_sublayers))
    return Profile((1,), sublayers, **{"optimizer_s_per_byte": 0.0, "state_bytes_ratio": 2.0,
                                       "step_overhead_s": 0.0, "link": FREE, "all_reduce": FREE,
                                       **changes})


def situation(current: PipelinePlan | None = None, **changes: Any) -> PlanSituation:
    """Plan 8 samples on two ranks; fields of the request may be changed, too."""
    fields = {field.name for field in dataclasses.fields(PlanRequest)}
    wanted = {"num_ranks": 2, "slots_per_node": 2, "global_batch": 8, "num_frozen": 0,
              **{name: value for name, value in changes.items() if name in fields}}
    others = {name: value for name, value in changes.items() if name not in fields}
    return PlanSituation(**{"step": 0, "remaining_steps": 10, "profile": profile(),
                            "request": PlanRequest(**wanted), "current": current,
                            "transition_s": 1.0, **others})


def pipeline(length: int, **changes: Any) -> PipelinePlan:
    """Return the plan of a given length."""
    return plan_pipeline(profile(), situation(lengths=(length,), **changes).request)


# Two replicas take 4 samples x 12 s = 48 s a step. Two stages of 2 sublayers, with M = 8
# micro-batches of a sample, take (8 + 1) x 6 s = 54 s. So K = 1 saves 6 s a step.
SAVED_S = 6.0


def test_the_example_s_times_are_as_drawn() -> None:
    assert pipeline(1).predicted_step_s == 48.0
    assert pipeline(2).predicted_step_s == 48.0 + SAVED_S


def test_the_first_plan_is_the_fastest_whatever_a_transition_costs() -> None:
    assert fastest_plan(situation(transition_s=1e9)) == pipeline(1)


@pytest.mark.parametrize(("remaining_steps", "transition_s", "length"), [
    (10, 59.0, 1), (10, 60.0, 2), (10, 61.0, 2), (9, 59.0, 2), (1, 5.9, 1), (0, 0.0, 2),
    (1000, 60.0, 1)])
def test_a_pipeline_is_left_only_where_the_saving_exceeds_the_transition(
        remaining_steps: int, transition_s: float, length: int) -> None:
    plan = fastest_plan(situation(pipeline(2), remaining_steps=remaining_steps,
                                  transition_s=transition_s))
    assert plan == pipeline(length)


def test_a_stay_is_planned_anew_for_what_is_frozen_now() -> None:
    plan = fastest_plan(situation(pipeline(2), num_frozen=2, transition_s=1e9))
    assert (plan.length, plan.boundaries) == (2, (2, 3, 4))


def test_a_pipeline_that_no_longer_fits_the_memory_is_left_whatever_that_costs() -> None:
    # Four trained sublayers need 1600 bytes; two of them 800.
    frozen = situation(num_frozen=2, memory_limit_bytes=1000)
    assert fastest_plan(frozen).length == 1
    thawed = situation(fastest_plan(frozen), memory_limit_bytes=1000, transition_s=1e9)
    assert fastest_plan(thawed).length == 2


def test_nothing_that_fits_is_an_error_that_says_what_would() -> None:
    for scale_batch in (False, True):
        with pytest.raises(ValueError, match=r"no plan fits memory_limit_bytes = 500: .*raise"):
            fastest_plan(situation(memory_limit_bytes=500, scale_batch=scale_batch))


def test_a_length_the_user_forbids_is_left_whatever_that_costs() -> None:
    assert fastest_plan(situation(pipeline(1), lengths=(2,), transition_s=1e9)) == pipeline(2)


def test_a_length_that_another_world_does_not_allow_is_left() -> None:
    four = pipeline(4, num_ranks=4, slots_per_node=4)
    assert fastest_plan(situation(four, transition_s=1e9)).length in (1, 2)


# With scale_batch each pipeline has 8 samples: K = 1 trains 16 in 96 s, K = 2 trains 8 in 54 s.
def test_growing_batches_are_compared_by_the_sample() -> None:
    plan = fastest_per_sample(situation(scale_batch=True))
    assert (plan.length, plan.predicted_step_s) == (1, 96.0)
    assert fastest_per_sample(situation(scale_batch=True, lengths=(2,))).predicted_step_s == 54.0


@pytest.mark.parametrize(("transition_s", "length"), [(59.0, 1), (60.0, 2), (61.0, 2)])
def test_growing_batches_save_by_the_sample_too(transition_s: float, length: int) -> None:
    # The 10 steps that remain at K = 2 are 5 of twice the samples at K = 1: 540 s against 480 s.
    plan = fastest_plan(situation(pipeline(2), scale_batch=True, transition_s=transition_s))
    assert plan.length == length


def test_shrinking_batches_save_by_the_sample_too() -> None:
    # A slow all-reduce makes K = 2 the faster: 8 samples in 54 s against 16 in 96 s + 100 s.
    slow = profile(all_reduce=LinkCost(100.0, math.inf))
    one, two = (predict(slow, situation(global_batch=batch).request, boundaries=cuts,
                        num_micro_batches=8, schedule="1f1b")
                for batch, cuts in ((16, (0, 4)), (8, (0, 2, 4))))
    assert (one.predicted_step_s, two.predicted_step_s) == (196.0, 54.0)
    for transition_s, length in ((879.0, 2), (881.0, 1)):  # 10 x (196 - 2 x 54) = 880
        plan = fastest_plan(situation(one, profile=slow, scale_batch=True,
                                      transition_s=transition_s))
        assert plan.length == length

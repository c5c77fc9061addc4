"""Prove that the predicted cost of a transition follows its bytes and what earlier ones took."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from autopipe.plan.request import PipelinePlan
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile, SublayerCost
from pipetransformer.elastic.costs import TransitionCost
from pipetransformer.processes.world import World
from tests.costs import FREE, sums

TWO = World(0, 2, 2, torch.device("cpu"), None, owned=False)
# Weights of 1 MB and optimizer state of 2 MB a sublayer, over a link of 100 MB/s.
SUBLAYERS = tuple(
    SublayerCost(
        f"layer {i}", i, (1.0,), (1.0,), (1.0,), (0.5,), 1_000_000, 1_000_000, 2_000_000, 0, 0, 0
    )
    for i in range(4)
)
PROFILE = Profile((1,), SUBLAYERS, 0.0, 0.0, 0.0, LinkCost(0.0, 100e6), FREE, sums())


def pipeline(*boundaries: int) -> PipelinePlan:
    """Make a plan with these boundaries."""
    length = len(boundaries) - 1
    return PipelinePlan(length, boundaries, 1, "1f1b", 1.0, (0,) * length)


def test_a_change_that_moves_nothing_costs_the_regrouping_alone() -> None:
    cost = TransitionCost(TWO)
    still_s = cost.predict_s(PROFILE, pipeline(0, 2, 4), pipeline(0, 2, 4))
    assert 0 < still_s < 0.5
    # Rank 0's two sublayers stay where they are when the bottom one freezes.
    assert cost.predict_s(PROFILE, pipeline(0, 2, 4), pipeline(1, 2, 4)) == still_s


def test_bytes_cost_in_proportion_to_the_rank_that_receives_most() -> None:
    cost = TransitionCost(TWO)
    still_s = cost.predict_s(PROFILE, pipeline(0, 2, 4), pipeline(0, 2, 4))
    half_s = cost.predict_s(PROFILE, pipeline(0, 2, 4), pipeline(0, 3, 4)) - still_s
    whole_s = cost.predict_s(PROFILE, pipeline(0, 2, 4), pipeline(0, 4)) - still_s
    # One sublayer to rank 0; or two to rank 0 and two to rank 1 at the same time.
    assert whole_s == pytest.approx(2 * half_s)
    assert half_s >= 3_000_000 / 100e6
    slow = dataclasses.replace(PROFILE, link=LinkCost(0.0, 10e6))
    slow_s = cost.predict_s(slow, pipeline(0, 2, 4), pipeline(0, 4)) - still_s
    assert slow_s == pytest.approx(10 * whole_s)


def test_what_a_transition_took_corrects_the_coming_predictions_and_survives_a_resume() -> None:
    cost, resumed = TransitionCost(TWO), TransitionCost(TWO)
    there, back = pipeline(0, 2, 4), pipeline(0, 4)
    first_s = cost.predict_s(PROFILE, there, back)
    cost.note(PROFILE, there, back, seconds=3 * first_s)
    assert cost.predict_s(PROFILE, there, back) == pytest.approx(3 * first_s)
    resumed.load_state_dict(json.loads(json.dumps(cost.state_dict())))
    assert resumed.predict_s(PROFILE, back, there) == cost.predict_s(PROFILE, back, there)


def test_a_change_that_moves_nothing_tells_nothing_of_the_bytes() -> None:
    cost = TransitionCost(TWO)
    here, there = pipeline(0, 2, 4), pipeline(0, 4)
    still_s, far_s = cost.predict_s(PROFILE, here, here), cost.predict_s(PROFILE, here, there)
    cost.note(PROFILE, here, here, seconds=still_s + 4.0)
    assert cost.predict_s(PROFILE, here, there) == pytest.approx(far_s + 4.0)
    # One faster than regrouping alone leaves no negative time for the bytes.
    cost.note(PROFILE, here, there, seconds=1.0)
    assert cost.predict_s(PROFILE, here, there) == still_s + 4.0

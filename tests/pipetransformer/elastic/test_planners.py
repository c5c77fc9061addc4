"""Prove that a pipeline is changed only where that pays, or where it can no longer stay."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from autopipe.plan.paper_rules import plan_as_published
from autopipe.plan.request import PipelinePlan, PlanRequest
from autopipe.plan.search import plan_pipeline, predict
from autopipe.profile.profile import Profile
from pipetransformer import PlanSituation, fastest_plan, published_plan
from pipetransformer.config import PLANS
from pipetransformer.elastic import (
    complete_request,
    fastest_per_sample,
)
from pipetransformer.elastic.planners import PLANNERS
from tests.helpers import costs
from tests.helpers.costs import sums


def profile(num_sublayers: int = 4, **changes: Any) -> Profile:
    """Cost 1 s forward and 2 s backward a sample; 400 bytes a sublayer, activations none."""
    return costs.profile(
        *(costs.sublayer(layer, saved_bytes=0.0) for layer in range(num_sublayers)), **changes
    )


def situation(current: PipelinePlan | None = None, **changes: Any) -> PlanSituation:
    """Plan 8 samples on two ranks; fields of the request may be changed, too, and what any
    transition costs."""
    transition_s = changes.pop("transition_s", 1.0)
    fields = {field.name for field in dataclasses.fields(PlanRequest)}
    wanted = {
        "num_ranks": 2,
        "slots_per_node": 2,
        "global_batch": 8,
        "num_frozen": 0,
        **{name: value for name, value in changes.items() if name in fields},
    }
    others = {name: value for name, value in changes.items() if name not in fields}
    return PlanSituation(
        **{
            "step": 0,
            "remaining_steps": 10,
            "profile": profile(),
            "request": PlanRequest(**wanted),
            "current": current,
            "transition_s": lambda plan: transition_s,
            **others,
        }
    )


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


@pytest.mark.parametrize(
    ("remaining_steps", "transition_s", "length"),
    [
        (10, 59.0, 1),
        (10, 60.0, 2),
        (10, 61.0, 2),
        (9, 59.0, 2),
        (1, 5.9, 1),
        (0, 0.0, 2),
        (1000, 60.0, 1),
    ],
)
def test_a_pipeline_is_left_only_where_the_saving_exceeds_the_transition(
    remaining_steps: int, transition_s: float, length: int
) -> None:
    plan = fastest_plan(
        situation(pipeline(2), remaining_steps=remaining_steps, transition_s=transition_s)
    )
    assert plan == pipeline(length)


def test_each_length_bears_its_own_transition() -> None:
    # Four ranks train 8 samples in 24 s (K = 1), 30 s (K = 2) or 33 s (K = 4).
    four = {"num_ranks": 4, "slots_per_node": 4}
    plans = {length: pipeline(length, **four) for length in (1, 2, 4)}
    assert [plans[length].predicted_step_s for length in (1, 2, 4)] == [24.0, 30.0, 33.0]
    costs = {1: 75.0, 2: 10.0}
    stay = situation(plans[4], **four)
    leave = dataclasses.replace(stay, transition_s=lambda plan: costs[plan.length])
    assert fastest_plan(leave) == plans[2]  # Saves 10 x 3 - 10 s, and K = 1 saves 10 x 9 - 75 s.


def test_stages_of_which_one_has_frozen_are_cut_anew_where_leaving_them_costs_more() -> None:
    frozen = situation(pipeline(2), num_frozen=2)
    plan = fastest_plan(
        dataclasses.replace(frozen, transition_s=lambda plan: 1.0 if plan.length == 2 else 1e9)
    )
    assert (plan.length, plan.boundaries) == (2, (2, 3, 4))


@pytest.mark.parametrize(("transition_s", "boundaries"), [(59.0, (1, 3, 5)), (61.0, (1, 2, 5))])
def test_stages_of_the_same_number_are_repacked_only_where_that_pays(
    transition_s: float, boundaries: tuple[int, ...]
) -> None:
    # Stages of one and three sublayers take 86 s a step, of two and two 74 s.
    five = {"profile": profile(5), "lengths": (2,), "num_frozen": 1, "micro_batches": (2,)}
    current = dataclasses.replace(pipeline(2), boundaries=(0, 2, 5), num_micro_batches=2)
    plan = fastest_plan(situation(current, remaining_steps=5, transition_s=transition_s, **five))
    assert plan.boundaries == boundaries


def test_a_current_plan_of_more_micro_batches_than_samples_is_compared_with_fewer() -> None:
    current = dataclasses.replace(pipeline(2), num_micro_batches=99)
    assert fastest_plan(situation(current, transition_s=1e9)).boundaries == (0, 2, 4)


def test_a_pipeline_that_no_longer_fits_the_memory_is_left_whatever_that_costs() -> None:
    # Two trained sublayers and two frozen ones need 1200 bytes where two replicas sum gradients.
    frozen = situation(num_frozen=2, memory_limit_bytes=1200)
    assert fastest_plan(frozen).length == 1
    thawed = situation(fastest_plan(frozen), memory_limit_bytes=1000, transition_s=1e9)
    assert fastest_plan(thawed).length == 2


def test_stages_that_recompute_stay_so_until_memory_allows_them_to_keep() -> None:
    heavy = costs.profile(*(costs.sublayer(layer, saved_bytes=100.0) for layer in range(6)))
    shape: dict[str, Any] = {
        "profile": heavy, "lengths": (2,), "micro_batches": (2,), "recompute": (False, True),
    }  # fmt: skip
    limit = {"memory_limit_bytes": 3000}
    first = fastest_plan(situation(**shape, **limit))
    assert first.recomputes and first.boundaries == (0, 3, 6)
    stays = fastest_plan(situation(first, transition_s=1e9, **shape, **limit))
    assert stays == first
    # Stage 0 trains one layer of three now, and has room for its activations.
    frozen = fastest_plan(situation(first, transition_s=1e9, num_frozen=2, **shape, **limit))
    assert not frozen.recomputes and frozen.boundaries == (2, 3, 6)
    with pytest.raises(ValueError, match="no plan fits"):
        fastest_plan(situation(**{**shape, "recompute": (False,)}, **limit))


def test_nothing_that_fits_is_an_error_that_says_what_would() -> None:
    for scale_batch in (False, True):
        with pytest.raises(ValueError, match=r"no plan fits memory_limit_bytes = 500: .*raise"):
            fastest_plan(situation(memory_limit_bytes=500, scale_batch=scale_batch))


def test_a_length_the_user_forbids_is_left_whatever_that_costs() -> None:
    assert fastest_plan(situation(pipeline(1), lengths=(2,), transition_s=1e9)) == pipeline(2)


def test_a_length_that_another_world_does_not_allow_is_left() -> None:
    four = pipeline(4, num_ranks=4, slots_per_node=4)
    assert fastest_plan(situation(four, transition_s=1e9)) == pipeline(1)


# With scale_batch each pipeline has 8 samples: K = 1 trains 16 in 96 s, K = 2 trains 8 in 54 s.
def test_a_gain_that_noise_can_fake_is_left() -> None:
    near, far = (
        situation(pipeline(2), remaining_steps=1000, profile=profile(uncertainty=share))
        for share in (0.05, 0.08)
    )
    # K = 1 saves an eighth.
    assert (fastest_plan(near).length, fastest_plan(far).length) == (1, 2)


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
    slow = profile(all_reduce=sums(100.0))
    one, two = (
        predict(
            slow,
            situation(global_batch=batch).request,
            boundaries=cuts,
            num_micro_batches=8,
            schedule="1f1b",
        )
        for batch, cuts in ((16, (0, 4)), (8, (0, 2, 4)))
    )
    assert (one.predicted_step_s, two.predicted_step_s) == (196.0, 54.0)
    for transition_s, length in ((879.0, 2), (881.0, 1)):  # 10 x (196 - 2 x 54) = 880
        plan = fastest_plan(
            situation(one, profile=slow, scale_batch=True, transition_s=transition_s)
        )
        assert plan.length == length


# The published rules balance four equal layers on two stages as 1 and 3. So K = 1 comes with two
# frozen layers: 2 + 2/6 layers are no more than 3, where with one frozen layer 3 + 1/6 are.
@pytest.mark.parametrize(("num_frozen", "length"), [(0, 2), (1, 2), (2, 1), (3, 1)])
def test_the_published_plan_follows_its_rules_whatever_a_transition_costs(
    num_frozen: int, length: int
) -> None:
    asked = situation(pipeline(2), num_frozen=num_frozen, transition_s=1e9)
    assert published_plan(asked) == plan_as_published(asked.profile, asked.request)
    assert published_plan(asked).length == length


def test_the_published_plan_never_grows_not_even_for_a_thaw() -> None:
    short = published_plan(situation(num_frozen=2))
    thawed = published_plan(situation(short, num_frozen=0))
    assert (short.length, thawed.length, thawed.boundaries) == (1, 1, (0, 4))


def test_the_published_plan_starts_anew_in_a_world_that_lacks_the_current_length() -> None:
    three = pipeline(3, num_ranks=3, slots_per_node=3)
    four = situation(three, num_ranks=4, slots_per_node=4, num_frozen=2)
    assert published_plan(four) == plan_as_published(four.profile, four.request)


def test_the_published_batch_grows_with_the_replicas() -> None:
    # One sublayer is active: both replicas take 8 samples x (3 x 1/2 + 3) s.
    plan = published_plan(situation(num_frozen=3, scale_batch=True))
    assert (plan.length, plan.predicted_step_s) == (1, 36.0)
    assert published_plan(situation(num_frozen=3)).predicted_step_s == 18.0


def test_a_growing_batch_is_held_against_the_memory_once_its_replicas_are_known() -> None:
    whole = profile()
    kept = dataclasses.replace(
        whole,
        sublayers=tuple(dataclasses.replace(cost, saved_bytes=100.0) for cost in whole.sublayers),
    )
    wanted: dict[str, Any] = {"profile": kept, "scale_batch": True}
    # K = 2 leaves one replica with 8 samples; 16 of them would not fit.
    limit = max(published_plan(situation(**wanted)).peak_bytes)
    assert published_plan(situation(**wanted, memory_limit_bytes=limit)).length == 2
    with pytest.raises(ValueError, match=rf"memory_limit_bytes = {limit - 1}; .*plan=\"fastest\""):
        published_plan(situation(**wanted, memory_limit_bytes=limit - 1))


def test_every_plan_that_a_configuration_names_has_a_planner() -> None:
    assert PLANNERS["fastest"] is fastest_plan and PLANNERS["published"] is published_plan
    assert PLANNERS.keys() == set(PLANS)  # All that a configuration takes.


# A frozen layer takes 1 s a sample and leaves 400 bytes: read at 1,000 bytes/s they take 0.4 s, so
# that a row saves 0.6 s each time it is read.
@pytest.mark.parametrize(
    ("read", "write", "reads", "is_cached"),
    [
        (1000.0, 1000.0, math.inf, True),
        (1000.0, 1000.0, 1.0, True),
        (1000.0, 1000.0, 0.6, False),
        (1000.0, 1000.0, 0.0, False),
        # Writing it takes 2 s.
        (1000.0, 200.0, 3.0, False),
        (1000.0, 200.0, 4.0, True),
        (1000.0, 200.0, math.inf, True),
        (399.0, 1000.0, math.inf, False),
        (None, 1000.0, math.inf, False),
    ],
)
def test_activations_are_cached_where_reading_them_pays_for_writing_them(
    read: float | None, write: float, reads: float, is_cached: bool
) -> None:
    frozen = costs.profile(
        *(costs.sublayer(layer, forward_s=2.0, output_bytes=400.0) for layer in range(4))
    )
    request = PlanRequest(2, 2, 8, 1, prefix_chunk=1)
    rates = {"cache_bytes_per_s": read or 1.0, "cache_write_bytes_per_s": write}
    frozen = dataclasses.replace(frozen, **rates)
    caches = {"rows_found": float(read is not None)}
    completed = complete_request(request, frozen, **caches, reads_a_row=reads)
    assert completed.prefix_cached_s == (pytest.approx(0.4) if is_cached else None)
    none = dataclasses.replace(request, num_frozen=0)
    assert complete_request(none, frozen, **caches).prefix_cached_s is None


def test_rows_of_which_a_part_is_found_cost_what_the_others_take_to_compute() -> None:
    frozen = costs.profile(
        *(costs.sublayer(layer, forward_s=2.0, output_bytes=400.0) for layer in range(4)),
        cache_bytes_per_s=1000.0,
    )
    request = PlanRequest(2, 1, 8, 1, prefix_chunk=1)
    whole = complete_request(request, frozen, rows_found=1.0, on_gpu=True)
    half = complete_request(request, frozen, rows_found=0.5, on_gpu=True, reads_a_row=10.0)
    assert (whole.prefix_cached_s, whole.prefix_read_ahead) == (pytest.approx(0.4), True)
    # Reading takes 0.4 s, computing 1 s, which no step before hides.
    assert (half.prefix_cached_s, half.prefix_read_ahead) == (pytest.approx(0.7), False)
    # Each row is found half as often, so that 1.2 readings are none too many.
    seldom = complete_request(request, frozen, rows_found=0.5, reads_a_row=1.2)
    assert seldom.prefix_cached_s is None


# The frozen layer takes 1 s a sample; the three others train for 3 x (2 + 4) s, in a stage alone
# or in three.
@pytest.mark.parametrize(
    ("read_s", "longest", "reads", "is_cached"),
    [
        (18.5, 1, math.inf, True),  # Of which 0.5 s show: as much as computing saves.
        (19.5, 1, math.inf, False),
        (6.5, 3, math.inf, True),
        (7.5, 3, math.inf, False),
        # Hidden, reading saves all of the second; writing takes as long as reading.
        (17.0, 1, 18.0, True),
        (17.0, 1, 16.0, False),
    ],
)
def test_rows_that_are_read_ahead_save_what_does_not_exceed_the_shortest_stage(
    read_s: float, longest: int, reads: float, is_cached: bool
) -> None:
    layers = (costs.sublayer(n, forward_s=2.0, output_bytes=1.0) for n in range(4))
    profile = costs.profile(*layers, cache_bytes_per_s=1 / read_s)
    request = PlanRequest(3, 3, 8, 1, prefix_chunk=1, lengths=(longest,))
    completed = complete_request(request, profile, rows_found=1.0, on_gpu=True, reads_a_row=reads)
    assert completed.prefix_read_ahead == is_cached
    assert completed.prefix_cached_s == (pytest.approx(read_s) if is_cached else None)

"""Prove that the planner finds the fastest pipeline that fits, and says why nothing does."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest

from autopipe.plan.explanation import confidence
from autopipe.plan.request import PipelinePlan
from autopipe.plan.search import (
    candidates,
    near_fastest,
    plan_pipeline,
    predict,
    stage_compute_s,
    step_range,
)
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile
from tests.helpers.costs import profile, request, sublayer, sums, uniform


def random_profile(generator: random.Random) -> Profile:
    layers = [
        sublayer(
            layer,
            forward_s=generator.uniform(0.5, 2.0),
            parameter_bytes=generator.randint(50, 150),
            output_bytes=generator.uniform(0.0, 10.0),
        )
        for layer in range(generator.randint(4, 10))
    ]
    return profile(
        *layers,
        link=LinkCost(generator.random(), 100.0),
        step_overhead_s=0.5,
        all_reduce=sums(generator.random(), 50.0),
        optimizer_s_per_byte=1e-3,
    )


def test_model_that_fits_one_device_is_trained_without_a_pipeline() -> None:
    plan = plan_pipeline(uniform(4), request(4))
    assert (plan.length, plan.boundaries, plan.num_micro_batches) == (1, (0, 4), 1)
    assert plan.predicted_step_s == 4 * 3.0 * 4


def test_memory_limit_forces_a_pipeline_and_freezing_releases_it() -> None:
    # Training takes 400 bytes a layer (weights, gradients, two moments), with replicas another 100
    # (their sums); a frozen layer takes 100.
    limit = 1300
    whole = plan_pipeline(uniform(4), request(memory_limit_bytes=limit))
    assert (whole.length, whole.boundaries) == (2, (0, 2, 4))
    half = plan_pipeline(uniform(4), request(memory_limit_bytes=limit, num_frozen=2))
    assert (half.length, half.boundaries) == (1, (2, 4))
    assert max(*whole.peak_bytes, *half.peak_bytes) <= limit


def test_computed_prefix_moves_the_boundary_and_a_cached_one_does_not() -> None:
    forced: dict[str, Any] = {"lengths": (2,), "num_frozen": 12}
    # Twelve frozen forwards cost as much as two active layers.
    computed = plan_pipeline(uniform(18), request(**forced))
    cached = plan_pipeline(uniform(18), request(**forced, prefix_cached_s=1e-6))
    assert computed.boundaries == (12, 14, 18)
    assert cached.boundaries == (12, 15, 18)
    assert cached.predicted_step_s < computed.predicted_step_s


def test_frozen_weights_count_on_the_first_stage() -> None:
    plan = plan_pipeline(
        uniform(14), request(lengths=(2,), num_frozen=6, micro_batches=(16,), prefix_cached_s=0.0)
    )
    assert plan.peak_bytes[0] - plan.peak_bytes[1] == 6 * 100 + 10 + 4 * 10


def test_split_is_the_fastest_of_those_that_fit() -> None:
    heavy = profile(sublayer(0, parameter_bytes=1000), sublayer(1), sublayer(2), sublayer(3))
    forced: dict[str, Any] = {"lengths": (2,), "micro_batches": (16,)}
    assert plan_pipeline(heavy, request(**forced)).boundaries == (0, 2, 4)
    assert plan_pipeline(heavy, request(**forced, memory_limit_bytes=4100)).boundaries == (0, 1, 4)


def test_only_the_head_active_leaves_no_pipeline_but_more_replicas() -> None:
    plan = plan_pipeline(uniform(5), request(4, num_frozen=4))
    assert (plan.length, plan.boundaries) == (1, (4, 5))
    with pytest.raises(ValueError, match=r"1 active sublayers .* allow \[\] of the lengths \[2\]"):
        plan_pipeline(uniform(5), request(4, num_frozen=4, lengths=(2,)))


def test_equally_fast_plans_prefer_fewer_micro_batches_then_the_earlier_schedule() -> None:
    plans = candidates(uniform(2), request(1))
    assert {plan.predicted_step_s for plan in plans} == {16 * 6.0}
    best = plan_pipeline(uniform(2), request(1))
    assert (best.num_micro_batches, best.schedule) == (1, "1f1b")


@pytest.mark.parametrize(("all_reduce_s", "length"), [(20.0, 1), (100.0, 2)])
def test_shorter_pipeline_is_taken_unless_it_is_over_one_percent_slower(
    all_reduce_s: float, length: int
) -> None:
    # Besides the all-reduce one stage takes 3072 s; two stages take 3078 s, and no all-reduce.
    model = uniform(2, all_reduce=sums(all_reduce_s))
    plan = plan_pipeline(model, request(global_batch=1024, micro_batches=(512,)))
    assert plan.length == length


@pytest.mark.parametrize("seed", range(12))
def test_plan_is_the_one_an_exhaustive_search_takes(seed: int) -> None:
    generator = random.Random(seed)
    model = random_profile(generator)
    wanted = request(
        8,
        global_batch=generator.randint(8, 40),
        num_frozen=generator.randint(0, 3),
        slots_per_node=4,
        memory_limit_bytes=generator.choice([None, 2000, 3000, 5000]),
    )
    plans = candidates(model, wanted)
    if not plans:
        with pytest.raises(ValueError, match="no plan fits"):
            plan_pipeline(model, wanted)
        return
    close = [plan for plan in plans if plan.predicted_step_s <= 1.01 * plans[0].predicted_step_s]
    assert plan_pipeline(model, wanted) == min(
        close,
        key=lambda plan: (
            plan.length,
            plan.num_micro_batches,
            wanted.schedules.index(plan.schedule),
        ),
    )


def test_every_candidate_predicts_itself() -> None:
    model, wanted = random_profile(random.Random(0)), request(4, memory_limit_bytes=3000)
    plans = candidates(model, wanted)
    assert {plan.length for plan in plans} >= {2, 4}
    for plan in plans:
        assert plan == predict(
            model,
            wanted,
            boundaries=plan.boundaries,
            schedule=plan.schedule,
            num_micro_batches=plan.num_micro_batches,
        )


def test_nothing_fitting_names_the_stage_its_bytes_and_the_limit() -> None:
    heavy = profile(sublayer(0), sublayer(1, parameter_bytes=1000), sublayer(2))
    with pytest.raises(
        ValueError,
        match=(
            "no plan fits memory_limit_bytes = 3999: the smallest, 2 stages x 16 micro-batches "
            r"\(1f1b\), needs 4420 bytes on stage 1; raise the limit, lower the global batch"
        ),
    ):
        plan_pipeline(heavy, request(memory_limit_bytes=3999, micro_batches=(16,)))


def test_nothing_fitting_is_said_also_where_a_sublayer_returns_more_than_it_saves() -> None:
    # It was "max() arg is an empty sequence": two layers need fewer bytes with it than without.
    texts = profile(sublayer(0, output_bytes=500.0, saved_bytes=1.0), sublayer(1), sublayer(2))
    wanted = request(1, memory_limit_bytes=100, micro_batches=(1,))
    with pytest.raises(ValueError, match="no plan fits memory_limit_bytes = 100: the smallest"):
        plan_pipeline(texts, wanted)


@pytest.mark.parametrize(
    ("num_ranks", "slots", "length", "fitting"),
    [
        (4, 4, 5, r"\[1, 2, 3, 4\]"),
        (8, 4, 16, r"\[1, 2, 3, 4, 8\]"),
        (12, 4, 6, r"\[1, 2, 3, 4, 8, 12\]"),
        (4, 4, 0, r"\[1, 2, 3, 4\]"),
    ],
)
def test_length_that_does_not_fit_the_cluster_is_refused_with_those_that_do(
    num_ranks: int, slots: int, length: int, fitting: str
) -> None:
    with pytest.raises(ValueError, match=f"length {length} does not fit .* from {fitting}"):
        request(num_ranks, slots_per_node=slots, lengths=(length,))


def test_batch_smaller_than_the_replicas_lengthens_the_pipeline() -> None:
    plan = plan_pipeline(uniform(4), request(4, global_batch=2))
    assert plan.length == 2
    with pytest.raises(ValueError, match=r"batch of 2 on 4 ranks allow \[\] of the lengths \[1\]"):
        plan_pipeline(uniform(4), request(4, global_batch=2, lengths=(1,)))


def test_request_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="global_batch is 0; it must be at least 1"):
        request(global_batch=0)
    with pytest.raises(ValueError, match=r"\['zigzag'\] are not all known; choose from"):
        request(schedules=("zigzag",))
    with pytest.raises(ValueError, match="leave none of 4 sublayers to train; freeze at most 3"):
        plan_pipeline(uniform(4), request(num_frozen=4))


def test_plan_survives_json() -> None:
    plan = plan_pipeline(uniform(4), request(lengths=(2,)))
    assert PipelinePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("seed", range(10))
def test_the_planner_overlooks_no_plan_that_gains_from_idle_neighbours(seed: int) -> None:
    generator = random.Random(seed)
    known = dataclasses.replace(
        random_profile(generator), idle_node_share=generator.uniform(0.3, 1.0)
    )
    asked = request(4, num_frozen=generator.randint(0, 2))
    best = candidates(known, asked)[0]
    assert plan_pipeline(known, asked).predicted_step_s <= 1.01 * best.predicted_step_s


def test_a_lengthened_profile_computes_longer_and_reads_and_sends_as_before() -> None:
    known = random_profile(random.Random(0))
    longer = known.lengthened(1.5)
    assert longer.forward_s(0, 4) == pytest.approx(1.5 * known.forward_s(0, 4))
    assert longer.backward_s(0, 4) == pytest.approx(1.5 * known.backward_s(0, 4))
    assert longer.frozen_s(0, 4) == pytest.approx(1.5 * known.frozen_s(0, 4))
    assert longer.optimizer_s_per_byte == 1.5 * known.optimizer_s_per_byte
    assert longer.link == known.link and longer.all_reduce == known.all_reduce


def test_a_slow_rank_is_given_less_to_do() -> None:
    # Rank 1 takes twice as long: of 12 equal layers it gets 4 where there are two stages.
    equal, unequal = uniform(12), uniform(12, slowness=(1.0, 2.0))
    forced: dict[str, Any] = {"lengths": (2,), "micro_batches": (16,)}
    assert plan_pipeline(equal, request(**forced)).boundaries == (0, 6, 12)
    plan = plan_pipeline(unequal, request(**forced))
    assert plan.boundaries == (0, 8, 12)
    assert stage_compute_s(unequal, request(**forced), plan) == (16 * 24.0, 16 * 24.0)
    assert stage_compute_s(equal, request(**forced), plan) == (16 * 24.0, 16 * 12.0)
    # Where both do the same, each step waits for it: 8 samples of 12 layers of 3 s, twice as long.
    replicas = request(lengths=(1,))
    assert plan_pipeline(unequal, replicas).predicted_step_s == 2 * 8 * 36.0
    assert plan_pipeline(equal, replicas).predicted_step_s == 8 * 36.0


def test_a_stage_is_as_slow_as_the_slowest_of_its_replicas() -> None:
    equal, slow = uniform(4), uniform(4, slowness=(1.0, 1.0, 1.0, 3.0))

    def slowness(length: int) -> list[float]:
        asked = request(4, lengths=(length,))
        plan = plan_pipeline(equal, asked)
        times = (stage_compute_s(costs, asked, plan) for costs in (slow, equal))
        return [own / usual for own, usual in zip(*times, strict=True)]

    assert slowness(2) == [1.0, 3.0]
    assert slowness(4) == [1.0, 1.0, 1.0, 3.0]
    assert slowness(1) == [3.0]
    # Three of four ranks train: which, is not known here.
    assert slowness(3) == [3.0, 3.0, 3.0]


def noisy(share: float, *, sum_s: float = 10.0) -> Profile:
    """Cost K = 1 on two ranks 96 s and a sum, K = 2 with 16 micro-batches 102 s; computing varies
    by a share."""
    layers = [sublayer(layer, spread=(1 - share, 1 + share)) for layer in range(4)]
    return profile(*layers, all_reduce=sums(sum_s))


EITHER = request(micro_batches=(8, 16))


def test_a_step_s_range_is_its_prediction_with_the_quartiles() -> None:
    plan = plan_pipeline(noisy(0.1, sum_s=0.0), EITHER)
    assert (plan.length, plan.predicted_step_s) == (1, 96.0)
    low_s, high_s = step_range(noisy(0.1, sum_s=0.0), EITHER, plan)
    assert (low_s, high_s) == (pytest.approx(0.9 * 96), pytest.approx(1.1 * 96))


def test_of_pipelines_that_differ_by_less_than_the_spread_the_shortest_is_taken() -> None:
    # 106 s and 102 s: 4 s are less than 2 x 5 % of 102 s, and more than 2 x 1 %.
    unsure, sure = near_fastest(noisy(0.05), EITHER), near_fastest(noisy(0.01), EITHER)
    assert [(plan.length, plan.predicted_step_s) for plan in unsure] == [(1, 106.0), (2, 102.0)]
    assert [plan.length for plan in sure] == [2]
    assert plan_pipeline(noisy(0.05), EITHER) == unsure[0]


def test_noise_within_the_spread_does_not_change_the_choice() -> None:
    # Which of the two is predicted to be faster changes from measurement to measurement.
    generator = random.Random(0)
    sums_s = [generator.uniform(2.0, 10.0) for _ in range(20)]
    fastest = {candidates(noisy(0.05, sum_s=one), EITHER)[0].length for one in sums_s}
    assert fastest == {1, 2}
    assert {plan_pipeline(noisy(0.05, sum_s=one), EITHER).length for one in sums_s} == {1}


def test_micro_batches_of_one_pipeline_are_told_apart_whatever_the_spread() -> None:
    forced = request(lengths=(2,))
    assert plan_pipeline(noisy(0.5), forced) == plan_pipeline(noisy(0.0), forced)


def plain(length: int, step_s: float) -> PipelinePlan:
    return PipelinePlan(length, tuple(range(length + 1)), 2, "1f1b", step_s, (0,) * length, 0.0)


def test_how_sure_a_choice_is_names_the_plans_that_cannot_be_told_apart() -> None:
    near = [plain(1, 0.1), plain(2, 0.098)]
    range_text = "a step takes 90 ms to 120 ms by the quartiles of what was measured"
    both = "K = 1, M = 2 (100 ms) and K = 2, M = 2 (98 ms) cannot be told apart"
    assert confidence((0.09, 0.12), near, near[0]) == (
        f"{range_text}; {both}: K = 1 is taken, the shortest pipeline"
    )
    for current, rule in (
        (near[1], "stays, as going costs time"),
        (near[0], "is taken, which saves more until the end than going there costs"),
    ):
        text = confidence((0.09, 0.12), near, near[1], current=current)
        assert text == f"{range_text}; {both}: K = 2 {rule}"
    assert confidence((0.09, 0.12), near, plain(4, 0.2)) == range_text
    assert confidence((0.09, 0.12), near[:1], near[0]) == range_text
    assert confidence((0.1, 0.1), near, near[0]) == ""

"""Prove that a pipeline's predicted time and memory are those that can be added up by hand."""

from __future__ import annotations

from typing import Any

import pytest

from autopipe.plan import explain
from autopipe.plan.search import plan_pipeline, predict
from autopipe.plan.simulation import StageTimes, simulate
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile
from autopipe.schedule import micro_batch_sizes, replicated_one_f_one_b
from tests.helpers.costs import profile, request, sublayer, sums, uniform


def test_peak_bytes_are_weights_gradients_state_and_activations_in_flight() -> None:
    model = profile(*(sublayer(layer, output_bytes=1.0, buffer_bytes=7) for layer in range(6)))
    plan = predict(
        model,
        request(3, slots_per_node=3, global_batch=9, num_frozen=1),
        boundaries=(1, 3, 4, 6),
        num_micro_batches=3,
        schedule="1f1b",
    )
    # A micro-batch of 3; 3, 2 and 1 of them in flight; ends of 1 byte a sample each. What a frozen
    # layer takes while it runs is 10 bytes a sample and its two ends; of what it gives all 9 wait.
    assert plan.peak_bytes == (
        107 + 3 * 12 + 9 * 1 + 2 * 407 + 3 * 3 * (20 + 2),
        407 + 3 * 2 * (10 + 2),
        2 * 407 + 3 * 1 * (20 + 2),
    )


def test_in_a_transition_a_round_comes_in_the_place_of_gradients_and_activations() -> None:
    def peaks(round_bytes: int) -> tuple[int, ...]:
        wanted = request(lengths=(2,), num_frozen=4, micro_batches=(16,), round_bytes=round_bytes)
        return predict(
            uniform(7), wanted, boundaries=(4, 5, 7), num_micro_batches=16, schedule="1f1b"
        ).peak_bytes

    # Weights, moments and gradients of 1 and 2 layers; activations of 2 micro-batches and of 1.
    first, second = 4 * 100 + 10 + 400 + 2 * 10, 2 * 400 + 20
    assert peaks(0) == peaks(100) == (first, second)
    assert peaks(130) == (first, second)
    assert peaks(190) == (first - 130 + 190, second)
    assert peaks(300) == (4 * 100 + 300 + 300, 2 * 300 + 300)
    # No more can arrive than is held at last, and a tensor larger than a round travels alone.
    assert peaks(10_000) == (2 * 700, 2 * 600)
    assert peaks(1) == (first, second)


def test_cast_weights_are_held_for_every_micro_batch_in_flight() -> None:
    model = profile(*(sublayer(layer, copy_bytes=50) for layer in range(5)))
    without = profile(*(sublayer(layer) for layer in range(5)))

    def peaks(model: Profile) -> tuple[int, ...]:
        return predict(
            model,
            request(2, num_frozen=1),
            boundaries=(1, 3, 5),
            num_micro_batches=4,
            schedule="1f1b",
        ).peak_bytes

    # Of the frozen layers, which run without gradients, one at a time; 2 in flight, then 1.
    extra = tuple(a - b for a, b in zip(peaks(model), peaks(without), strict=True))
    assert extra == (50 + 2 * 2 * 50, 2 * 50)


def test_1f1b_holds_fewer_micro_batches_than_gpipe_on_every_stage() -> None:
    state = 2 * 400
    for schedule, in_flight in (("1f1b", (4, 3, 2, 1)), ("gpipe", (8, 8, 8, 8))):
        plan = predict(
            uniform(8),
            request(4),
            boundaries=(0, 2, 4, 6, 8),
            num_micro_batches=8,
            schedule=schedule,
        )
        assert plan.peak_bytes == tuple(state + 2 * number * 20 for number in in_flight)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 8, 16])
def test_uniform_stages_take_the_time_of_the_bubble_formula(
    schedule: str, num_micro_batches: int
) -> None:
    plan = predict(
        uniform(8),
        request(4),
        boundaries=(0, 2, 4, 6, 8),
        num_micro_batches=num_micro_batches,
        schedule=schedule,
    )
    stage_s = 16 * 2 * 3.0
    assert plan.predicted_step_s == pytest.approx(
        stage_s * (num_micro_batches + 4 - 1) / num_micro_batches
    )


def test_uneven_micro_batches_are_timed_by_their_own_sizes() -> None:
    plan = predict(
        uniform(1),
        request(1, global_batch=7),
        boundaries=(0, 1),
        num_micro_batches=3,
        schedule="gpipe",
    )
    assert plan.predicted_step_s == 7 * 3.0
    assert micro_batch_sizes(7, 3) == (3, 2, 2)


def test_each_micro_batch_costs_its_stage_a_time_of_its_own() -> None:
    def step_s(num_micro_batches: int, micro_batch_s: float) -> float:
        return predict(
            uniform(1, micro_batch_s=micro_batch_s),
            request(1, global_batch=8),
            boundaries=(0, 1),
            num_micro_batches=num_micro_batches,
            schedule="gpipe",
        ).predicted_step_s

    assert [step_s(count, 0.5) - step_s(count, 0.0) for count in (1, 4)] == [0.5, 2.0]


def test_step_ends_with_the_all_reduce_and_the_optimizer_of_the_largest_stage() -> None:
    model = uniform(
        3, optimizer_s_per_byte=0.01, step_overhead_s=5.0, all_reduce=sums(0.25, 100.0)
    )
    plan = predict(
        model,
        request(4, global_batch=2),
        boundaries=(0, 2, 3),
        num_micro_batches=1,
        schedule="gpipe",
    )
    # 2 replicas pass on 2 (R - 1) / R = 1 time the 200 bytes.
    assert plan.predicted_step_s == 3 * 3.0 + (0.25 + 200 / 100.0) + 200 * 0.01 + 5.0


def test_rows_of_an_embedding_that_stay_zeros_are_updated_and_not_summed() -> None:
    costs = {"optimizer_s_per_byte": 0.01, "all_reduce": sums(0.25, 100.0)}
    model = profile(sublayer(0, untouched_bytes=80.0), sublayer(1), **costs)
    plan = predict(
        model, request(2, global_batch=2), boundaries=(0, 2), num_micro_batches=1, schedule="gpipe"
    )
    assert plan.predicted_step_s == 2 * 3.0 + (0.25 + 120 / 100.0) + 200 * 0.01


def test_messages_between_stages_count_latency_and_bytes_each_way() -> None:
    model = profile(sublayer(0, output_bytes=10.0), sublayer(1), link=LinkCost(0.5, 20.0))
    plan = predict(
        model, request(global_batch=2), boundaries=(0, 1, 2), num_micro_batches=1, schedule="gpipe"
    )
    assert plan.predicted_step_s == 2 * 2 * 3.0 + 2 * (0.5 + 2 * 10.0 / 20.0)


def test_prediction_of_boundaries_that_miss_sublayers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"boundaries \(0, 4\) must ascend from 1 to 4"):
        predict(
            uniform(4),
            request(num_frozen=1),
            boundaries=(0, 4),
            num_micro_batches=1,
            schedule="gpipe",
        )


def test_stages_that_compute_alone_on_their_node_are_as_much_faster_as_measured() -> None:
    one = request(lengths=(2,), micro_batches=(1,), slots_per_node=2)
    slow, fast = (
        predict(
            uniform(4, idle_node_share=share),
            one,
            boundaries=(0, 2, 4),
            num_micro_batches=1,
            schedule="1f1b",
        ).predicted_step_s
        for share in (1.0, 0.75)
    )
    assert fast == 0.75 * slow
    # Two replicas of a whole model always compute side by side.
    whole = request(lengths=(1,), micro_batches=(1,))
    assert (
        plan_pipeline(uniform(4, idle_node_share=0.75), whole).predicted_step_s
        == plan_pipeline(uniform(4), whole).predicted_step_s
    )
    # So do slots of different nodes.
    apart = request(lengths=(2,), micro_batches=(1,), slots_per_node=1)
    assert plan_pipeline(uniform(4, idle_node_share=0.75), apart).predicted_step_s == slow


def test_of_many_micro_batches_only_the_first_and_the_last_find_a_stage_alone() -> None:
    def ratio(count: int) -> float:
        one = request(lengths=(2,), micro_batches=(count,), global_batch=64, slots_per_node=2)
        fast, slow = (
            plan_pipeline(uniform(4, idle_node_share=share), one).predicted_step_s
            for share in (0.5, 1.0)
        )
        return fast / slow

    assert 0.5 == ratio(1) < ratio(2) < ratio(8) < ratio(64) < 1.0


def test_the_samples_of_a_step_are_fetched_once_whatever_the_micro_batches() -> None:
    def step_s(count: int, **changes: Any) -> float:
        wanted = request(lengths=(1,), num_frozen=2, micro_batches=(count,), **changes)
        profile = uniform(4, cached_fetch_s=7.0, fetch_s=100.0)
        return plan_pipeline(profile, wanted).predicted_step_s

    cached, computed = {"prefix_cached_s": 0.0}, {"prefix_chunk": 4}
    assert step_s(1, **cached) == step_s(4, **cached)
    assert step_s(1, **computed) == step_s(4, **computed) == step_s(1, **cached) + 93.0 + 2 * 4


@pytest.mark.parametrize(
    ("read_s", "waits_s"), [(0.0, 0.0), (7.0, 0.0), (9.0, 0.0), (9.5, 4.0), (20.0, 88.0)]
)
def test_rows_that_are_read_ahead_take_what_exceeds_the_rest_of_the_step(
    read_s: float, waits_s: float
) -> None:
    # Two of four layers train 8 samples, for 3 s each; the fetch itself takes 7 s, and what
    # follows the schedule 24 s.
    wanted = request(
        1, global_batch=8, num_frozen=2, prefix_cached_s=read_s, prefix_read_ahead=True
    )
    model = uniform(4, cached_fetch_s=7.0, step_overhead_s=24.0)
    plan = plan_pipeline(model, wanted)
    assert plan.predicted_step_s == pytest.approx(7.0 + 8 * 2 * 3 + 24.0 + waits_s)
    assert plan.fetch_s == pytest.approx(7.0 + waits_s)


def test_reading_ahead_decides_for_the_length_whose_ranks_read_less() -> None:
    # Two stages pass 16 samples, of which the first must have all read; two replicas read 8 each.
    def length(**changes: Any) -> int:
        sum_s = sums(latency_s=30.0)
        wanted = request(num_frozen=2, **changes)
        return plan_pipeline(uniform(4, all_reduce=sum_s), wanted).length

    assert length(prefix_cached_s=2.5, prefix_read_ahead=True) == 2
    assert length(prefix_cached_s=6.0, prefix_read_ahead=True) == 1


def test_a_wide_stage_gets_more_layers() -> None:
    asked = request(3, stage_workers=(2, 1), lengths=(2,), global_batch=60, micro_batches=(12,))
    plan = plan_pipeline(uniform(6), asked)
    assert plan.boundaries == (0, 4, 6)
    assert plan.schedule == "1f1b"
    times = StageTimes(
        tuple((one * 5,) * 12 for one in (4.0, 2.0)),
        tuple((one * 5,) * 12 for one in (8.0, 4.0)),
        ((0.0,) * 12,),
    )
    schedule = replicated_one_f_one_b((2, 1), 12)
    expected = simulate(schedule, times, replicas=(2, 1)).step_s
    assert plan.predicted_step_s == pytest.approx(expected)
    # Without a bubble three ranks would take 60 samples x 18 s / 3.
    assert 360 <= plan.predicted_step_s < 1.2 * 360


def test_only_a_wide_stage_sums_gradients() -> None:
    costs = profile(sublayer(0), sublayer(1, parameter_bytes=10**6), all_reduce=sums(0.0, 1e3))
    wide = request(3, stage_workers=(2, 1), lengths=(2,))
    narrow = request(3, stage_workers=(1, 2), lengths=(2,))
    explained = {
        asked.stage_workers: explain(costs, asked, plan_pipeline(costs, asked)).parts.all_reduce_s
        for asked in (wide, narrow)
    }
    assert explained[(2, 1)] == pytest.approx(100 / 1e3, rel=1e-3)
    assert explained[(1, 2)] == pytest.approx(1e6 / 1e3, rel=1e-3)


def test_each_worker_of_the_first_stage_reads_its_own_samples_alone() -> None:
    costs = profile(sublayer(0), sublayer(1), read_s=0.5)
    asked = request(3, stage_workers=(2, 1), lengths=(2,), global_batch=60, micro_batches=(12,))
    explained = explain(costs, asked, plan_pipeline(costs, asked))
    computed_s = [sum(s.duration_s for s in explained.spans() if s.stage == w) for w in range(3)]
    read_s = [
        busy_s - own_s
        for busy_s, own_s in zip(explained.simulation.busy_s, computed_s, strict=True)
    ]
    assert read_s == pytest.approx([60 / 2 * 0.5, 60 / 2 * 0.5, 0.0])


def test_each_worker_has_its_peak_and_its_time() -> None:
    asked = request(4, stage_workers=(3, 1), lengths=(2,), global_batch=48)
    explained = explain(uniform(4), asked, plan_pipeline(uniform(4), asked))
    assert len(explained.simulation.busy_s) == 4
    peaks = {span.stage: span.peak_bytes for span in explained.spans()}
    assert [peaks[worker] for worker in range(4)] == [
        *[explained.plan.peak_bytes[0]] * 3,
        explained.plan.peak_bytes[1],
    ]
    parts = explained.parts
    assert parts.compute_s == pytest.approx(sum(explained.simulation.busy_s) / 4)


def test_it_takes_the_place_of_its_length_among_all() -> None:
    asked = request(4, stage_workers=(2, 1, 1), global_batch=24)
    assert asked.length_choices()[0] == (1, 2, 3, 4)
    assert [asked.replicas_of(length) for length in (1, 2, 3, 4)] == [4, 2, 1, 1]
    assert [asked.ranks_of(length) for length in (1, 2, 3, 4)] == [4, 4, 4, 4]
    assert asked.schedules_of(3) == ("1f1b",)


@pytest.mark.parametrize("workers", [(2, 2), (3, 0), ()])
def test_workers_that_are_not_all_ranks_are_refused(workers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not a worker or more a stage, and all 3 ranks"):
        request(3, stage_workers=workers)

"""Prove that stages of several workers are predicted as their schedule runs, and cut to suit."""

from __future__ import annotations

import pytest

from autopipe.plan import explain, plan_pipeline
from autopipe.plan.simulation import StageTimes, simulate
from autopipe.schedule import replicated_one_f_one_b
from tests.costs import profile, request, sublayer, sums, uniform


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

"""Prove what transitions cost, what steps take, and which pipelines are left again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autocache import CacheStats
from autopipe.plan.request import PipelinePlan
from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile, SublayerCost
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.elastic import planner as planning
from pipetransformer.elastic.costs import REVIEW_STEPS, Pace, TransitionCost, steady_step
from pipetransformer.elastic.decision import Decision, Review
from pipetransformer.processes.world import World
from pipetransformer.report.records import RECORDS_FILE, Record, read_records
from tests.helpers.costs import FREE, sums
from tests.helpers.inspection import stage_of
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool

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


def test_a_change_of_length_costs_new_groups_where_these_are_not_built_ahead() -> None:
    # Over NCCL communicators are built anew, for seconds; 0.05 s were predicted.
    took_s = [2.0]
    cost, ahead = TransitionCost(TWO, rebuild_s=lambda: took_s[0]), TransitionCost(TWO)
    two, one, frozen = pipeline(0, 2, 4), pipeline(0, 4), pipeline(1, 2, 4)
    for after, groups_s in ((one, 2.0), (frozen, 0.0), (two, 0.0)):
        usual_s = ahead.predict_s(PROFILE, two, after)
        assert cost.predict_s(PROFILE, two, after) == pytest.approx(usual_s + groups_s)
    # What new groups took is no price of bytes, nor of regrouping.
    usual_s = ahead.predict_s(PROFILE, two, one)
    took_s[0] = 3.0
    cost.note(PROFILE, two, one, seconds=usual_s + 3.0)
    assert cost.predict_s(PROFILE, two, one) == pytest.approx(usual_s + 3.0)
    assert cost.predict_s(PROFILE, two, frozen) == ahead.predict_s(PROFILE, two, frozen)


# Of 10 s, 4 s were spent on getting samples.
TOOK = {"data": 4.0, "compute": 5.0, "other": 1.0}


PLAN = PipelinePlan(1, (1, 4), 1, "1f1b", predicted_step_s=8.0, peak_bytes=(0,), fetch_s=2.0)


NO_LAYERS = CacheStats(hits=8, seconds=1.0)


ALL_LAYERS = CacheStats(misses=8, seconds=3.0)


def steady(stats: CacheStats, **told: Any) -> tuple[float, float]:
    settings = {"uses_cache": True, "has_workers": True, "on_cpu": True}
    return steady_step(TOOK, stats, PLAN, **{**settings, **told})


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("has_workers", [True, False])
def test_reading_rows_counts_and_loading_those_that_are_checked_does_not(
    has_workers: bool, on_cpu: bool
) -> None:
    assert steady(NO_LAYERS, has_workers=has_workers, on_cpu=on_cpu) == (7.0, 1.0)


def test_while_a_cache_fills_fetching_counts_as_it_is_predicted_to_become() -> None:
    assert steady(ALL_LAYERS) == (6.0 + 2.0, 2.0)
    assert steady(CacheStats(hits=7, upgrades=1)) == (6.0 + 2.0, 2.0)
    # Layers that a GPU computes while it is waited for cannot be told from those that train.
    assert steady(ALL_LAYERS, on_cpu=False) == (8.0, 2.0)


def test_a_prefix_that_is_computed_in_every_step_counts_and_waiting_for_workers_does_not() -> None:
    assert steady(ALL_LAYERS, uses_cache=False) == (6.0 + 3.0, 3.0)
    # Launched on a GPU, it has a part of all as large as predicted.
    assert steady(ALL_LAYERS, uses_cache=False, on_cpu=False) == (9.0, 9.0 / 4)


def test_reading_the_data_set_counts_where_no_worker_does_it() -> None:
    assert steady(CacheStats(), uses_cache=False) == (6.0, 0.0)
    assert steady(CacheStats(), uses_cache=False, has_workers=False) == (10.0, 4.0)


def test_the_pace_is_of_whole_steps_and_knows_what_of_them_trains() -> None:
    pace = Pace()
    for number in range(REVIEW_STEPS):
        assert pace.training_s is None
        pace.note(5.0 + number % 2, fetch_s=2.0, computed_s=1.0)
    assert (pace.median_s, pace.training_s) == (5.5, 3.5)


def watch(pace: Pace, *seconds: float) -> list[int]:
    """Note steps; return the positions at which the outcome became known."""
    return [n for n, one in enumerate(seconds) if pace.note(one, fetch_s=0.0, computed_s=one / 2)]


def test_the_outcome_is_the_median_after_warming_up_and_known_once() -> None:
    pace = Pace()
    assert watch(pace, 9.0, 9.0, *[2.0] * 9) == []
    assert pace.median_s is None
    assert watch(pace, 2.0) == [0]
    assert pace.median_s == 2.0 and pace.computed_s == 1.0
    assert watch(pace, *[2.0] * 20) == []


def test_one_slow_step_tells_nothing() -> None:
    pace = Pace()
    watch(pace, *[1.0] * REVIEW_STEPS, 50.0)
    assert pace.median_s == 1.0


def decision(length: int, micro_batches: int, *, step: int = 0, frozen: int = 0) -> Decision:
    boundaries = (frozen, *range(frozen + 1, frozen + length), 8)
    plan = PipelinePlan(length, boundaries, micro_batches, "1f1b", 1.0, (0,) * length)
    return Decision(step, frozen, plan, False, "")


def test_only_another_pipeline_length_or_number_of_micro_batches_is_reviewed() -> None:
    first = decision(2, 4)
    assert Review.of(None, first, was_measured=False) is None
    assert Review.of(first, decision(2, 4, step=5, frozen=3), was_measured=True) is None
    for other in (decision(1, 4, step=5), decision(2, 2, step=5)):
        assert Review.of(first, other, was_measured=True) == Review(
            5 + REVIEW_STEPS, first.plan, was_measured=True
        )


def train(folder: Path, **settings: Any) -> Trainer:
    """Train the tiny model to its end in this process, deciding every 4 steps."""
    with tiny_trainer(
        freeze=FreezeSchedule([0, 0, 0, 1]),
        folder=folder,
        epochs=6,
        global_batch_size=6,
        micro_batches=2,
        freeze_interval_steps=4,
        **settings,
    ) as trainer:
        trainer.fit()
    return trainer


def of_kind(folder: Path, kind: str) -> list[Record]:
    return [one for one in read_records(folder / RECORDS_FILE) if one["kind"] == kind]


def test_a_transition_records_what_steps_took_and_were_predicted_to_take(tmp_path: Path) -> None:
    train(tmp_path)
    first, second = of_kind(tmp_path, "transition")
    assert (first["step"], second["step"], second["frozen"]) == (0, 16, 1)
    assert first["measured_step_before_s"] is None and first["predicted_step_before_s"] is None
    assert min(second["measured_step_before_s"], second["predicted_step_before_s"]) > 0
    assert min(second["predicted_step_s"], second["seconds"], second["predicted_seconds"]) > 0
    assert second["bytes_moved"] == 0
    outcomes = of_kind(tmp_path, "outcome")
    assert outcomes[0]["changed_step"] == 0 and outcomes[0]["step"] == 11
    assert all(one["measured_step_s"] > 0 and one["predicted_step_s"] > 0 for one in outcomes)


def pipelines_of(
    folder: Path, slowness: float, resume_at: int | None, name: str | None = "fastest"
) -> list[Any]:
    """Train with a plan that goes from K = 1 to 2 at step 16, whose steps are made to take so
    many times what was predicted; return (step, K, reason) of every transition. The plan goes by
    a name, or is the user's own.
    """

    def plan(situation: Any) -> PipelinePlan:
        length = 1 if situation.step < 16 else 2
        profile = situation.profile
        first, last = profile.first_active(situation.request.num_frozen), len(profile.sublayers)
        boundaries = (first, last) if length == 1 else (first, (first + last) // 2, last)
        return PipelinePlan(length, boundaries, 2, "1f1b", 1.0, (0,) * length)

    def note(pace: Pace, seconds: float, *, known: Any = Pace.note, **parts: float) -> bool:
        # As predicted: what live steps calibrate is then the prediction itself.
        stage = stage_of(trainer)
        factor = slowness if stage.topology.length == 2 else 1.0
        return bool(known(pace, factor, fetch_s=0.0, computed_s=0.0))

    made: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(), "freeze": FreezeSchedule([0, 0]), "plan": name or plan,
        "folder": folder, "epochs": 20, "global_batch_size": 6, "progress": False,
        "freeze_interval_steps": 16, "checkpoint_every_steps": 20, "resume": "auto",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "note", note)
        patch.setitem(planning.PLANNERS, "fastest", plan)  # type: ignore[arg-type]
        trainer = Trainer(tiny_model(), tiny_data(), **made)
        for _ in range(resume_at or 32):
            trainer.step()
        trainer.close()
        if resume_at is not None:
            trainer = Trainer(tiny_model(), tiny_data(), **made)
            while trainer.global_step < 32:
                trainer.step()
            trainer.close()
    if not trainer.is_main_process:
        return []
    return [(one["step"], one["length"], one["reason"]) for one in of_kind(folder, "transition")]


def test_a_pipeline_that_turns_out_slower_is_left_again_once(
    two_ranks: Pool, tmp_path: Path
) -> None:
    start, there, back = two_ranks.run(pipelines_of, tmp_path / "slow", 1e6, None)[0]
    assert (start[:2], there[:2], back[:2]) == ((0, 1), (16, 2), (16 + REVIEW_STEPS, 1))
    assert "back to K = 1, M = 2: K = 2, M = 2 takes" in back[2]
    kept = two_ranks.run(pipelines_of, tmp_path / "fast", 1e-6, None)[0]
    assert [one[:2] for one in kept] == [(0, 1), (16, 2)]


def test_a_planner_of_the_users_own_is_obeyed(two_ranks: Pool, tmp_path: Path) -> None:
    kept = two_ranks.run(pipelines_of, tmp_path, 1e6, None, None)[0]
    assert [one[:2] for one in kept] == [(0, 1), (16, 2)]


def test_a_resumed_run_goes_back_where_the_interrupted_one_did(
    two_ranks: Pool, tmp_path: Path
) -> None:
    # Interrupted at step 30 and continued from 20, too late to know what the steps before took.
    resumed = two_ranks.run(pipelines_of, tmp_path, 1e6, 30)[0]
    # The first run's record, and the second's.
    assert [one[:2] for one in resumed if one[0] == 16 + REVIEW_STEPS] == [(28, 1), (28, 1)]

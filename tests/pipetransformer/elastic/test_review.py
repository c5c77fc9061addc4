"""Prove when it is known what a plan's steps take, and what follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autopipe.plan.request import PipelinePlan
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.elastic import planners as planning
from pipetransformer.elastic.costs import REVIEW_STEPS, Pace, SteadyStep
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.elasticity import Review
from pipetransformer.report.records import RECORDS_FILE, Record, read_records
from tests.models import tiny_data, tiny_model
from tests.pool import Pool


def watch(pace: Pace, *seconds: float) -> list[int]:
    """Note steps; return the positions at which the outcome became known."""
    return [n for n, one in enumerate(seconds) if pace.note(SteadyStep(one), one / 2)]


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
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=FreezeSchedule([0, 0, 0, 1]),
        folder=folder,
        epochs=6,
        global_batch_size=6,
        micro_batches=2,
        progress=False,
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

    def note(pace: Pace, step: SteadyStep, computed_s: float, known: Any = Pace.note) -> bool:
        # As predicted: what live steps calibrate is then the prediction itself.
        stage = trainer._deployment.active_stage
        factor = slowness if stage.topology.length == 2 else 1.0
        return bool(known(pace, SteadyStep(factor), 0.0))

    made: dict[str, Any] = {
        "loss_fn": nn.CrossEntropyLoss(), "freeze": FreezeSchedule([0, 0]), "plan": name or plan,
        "folder": folder, "epochs": 20, "global_batch_size": 6, "progress": False,
        "freeze_interval_steps": 16, "checkpoint_every_steps": 20, "resume": "auto",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "note", note)
        patch.setitem(planning._BY_NAME, "fastest", plan)  # type: ignore[arg-type]
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

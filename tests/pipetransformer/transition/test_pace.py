"""Prove when a plan's outcome is known, and what counts as a drift."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freeze.rules import FreezeSchedule
from pipetransformer import Loss, Trainer
from pipetransformer.report.records import RECORDS_FILE, Record, read_records
from pipetransformer.transition import pace as pace_module
from pipetransformer.transition.pace import Pace
from tests.models import tiny_data, tiny_model


def watch(pace: Pace, *seconds: float) -> list[int]:
    """Note steps; return the positions at which the outcome became known."""
    return [n for n, one in enumerate(seconds) if pace.note(one)]


def begun(predicted_s: float = 1.0) -> Pace:
    pace = Pace()
    pace.begin(predicted_s)
    return pace


def test_the_outcome_is_the_median_after_warming_up_and_known_once() -> None:
    pace = begun()
    assert watch(pace, 9.0, 9.0, *[2.0] * 9) == []
    assert pace.median_s is None
    assert watch(pace, 2.0) == [0]
    assert pace.median_s == 2.0
    assert watch(pace, *[2.0] * 20) == []


def test_a_prediction_that_is_wrong_from_the_start_is_no_drift() -> None:
    pace = begun(predicted_s=1.0)
    watch(pace, *[3.0] * 30)
    assert not pace.has_drifted


@pytest.mark.parametrize(
    ("factor", "drifted"), [(1.2, False), (1.3, True), (0.85, False), (0.75, True)]
)
def test_steps_that_leave_what_they_took_by_a_quarter_have_drifted(
    factor: float, drifted: bool
) -> None:
    pace = begun()
    watch(pace, *[2.0] * 12)
    watch(pace, *[2.0 * factor] * 10)
    assert pace.has_drifted == drifted


def test_one_slow_step_is_no_drift() -> None:
    pace = begun()
    watch(pace, *[1.0] * 12, 50.0)
    assert not pace.has_drifted


def test_another_plan_that_keeps_its_prediction_is_no_drift_and_one_that_does_not_is() -> None:
    pace = begun(predicted_s=1.0)
    watch(pace, *[1.1] * 12)
    pace.begin(0.5)
    watch(pace, *[0.55] * 12)
    assert not pace.has_drifted
    pace.begin(0.5)
    watch(pace, *[0.9] * 12)
    assert pace.has_drifted


def test_measuring_anew_must_be_worth_it() -> None:
    pace = begun()
    assert not pace.has_drifted_enough(remaining_steps=10**9, cost_s=0.0)
    # Steps of 2 s that took 1 s at first have half of their time at stake.
    watch(pace, *[1.0] * 12, *[2.0] * 10)
    assert pace.has_drifted_enough(remaining_steps=21, cost_s=10.0)
    assert not pace.has_drifted_enough(remaining_steps=20, cost_s=10.0)
    # What others would take is as uncertain where steps take half of what they did.
    watch(pace, *[0.5] * 10)
    assert pace.has_drifted_enough(remaining_steps=81, cost_s=10.0)
    assert not pace.has_drifted_enough(remaining_steps=80, cost_s=10.0)
    # By less, more steps must remain.
    watch(pace, *[1.3] * 10)
    assert pace.has_drifted_enough(remaining_steps=67, cost_s=10.0)
    assert not pace.has_drifted_enough(remaining_steps=66, cost_s=10.0)


def test_a_new_profile_starts_over() -> None:
    pace = begun(predicted_s=1.0)
    watch(pace, *[1.0] * 12, *[2.0] * 10)
    assert pace.has_drifted
    pace.begin(2.0, measured_anew=True)
    watch(pace, *[2.2] * 12)
    assert not pace.has_drifted


@pytest.mark.parametrize("resumed", [False, True])
def test_steps_that_become_slower_have_the_devices_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    # Steps sleep, so that what the machine does besides is small against them.
    monkeypatch.setattr(pace_module, "_LEAST_STAKE", 0)
    seconds = 0.03

    def slow_loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(seconds if torch.is_grad_enabled() else 0.0)
        return nn.functional.cross_entropy(output, target)

    settings: dict[str, Any] = {
        "loss_fn": Loss(slow_loss, is_exact=True), "folder": tmp_path, "global_batch_size": 6,
        "micro_batches": 1, "progress": False, "freeze_interval_steps": 4, "epochs": 20,
        "resume": "auto",
        "checkpoint_every_steps": 16,
    }  # fmt: skip
    trainer = Trainer(tiny_model(), tiny_data(), **settings)
    for _ in range(16):
        trainer.step()
    if resumed:
        trainer.close()
        trainer = Trainer(tiny_model(), tiny_data(), **settings)
    assert not of_kind(tmp_path, "measurement")
    seconds = 0.12
    for _ in range(20):
        trainer.step()
    trainer.close()
    assert [one["step"] for one in of_kind(tmp_path, "measurement")] in ([24], [28], [32])


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


def test_steps_that_drift_have_the_devices_measured_anew_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "has_drifted_enough", lambda self, **figures: False)
    usual = train(tmp_path / "usual")
    answers = iter([False, True, *[False] * 20])
    monkeypatch.setattr(Pace, "has_drifted_enough", lambda self, **figures: next(answers))
    drifted = train(tmp_path / "drifted")
    assert [one["step"] for one in of_kind(tmp_path / "drifted", "measurement")] == [8]
    assert not of_kind(tmp_path / "usual", "measurement")
    ours, theirs = (t._task.model.model.state_dict() for t in (drifted, usual))
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name

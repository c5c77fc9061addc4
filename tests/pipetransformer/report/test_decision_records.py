"""Prove that decisions are read as they were, and that their table says all that changed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freeze import (
    FreezeContext,
    LayerStats,
    Linear,
)
from pipetransformer.report import read_decisions
from pipetransformer.report.records import decision_fields
from tests.helpers.models import tiny_trainer

NUM_LAYERS = 4


def context(step: int, predict: Callable[[int], float]) -> FreezeContext:
    return FreezeContext(
        step=step,
        epoch=0,
        max_steps=20,
        steps_per_epoch=20,
        learning_rate=0.5,
        peak_learning_rate=1.0,
        mean_learning_rate=0.75,
        layers=tuple(LayerStats(f"layer {i}", i, 10) for i in range(NUM_LAYERS)),
        num_frozen=0,
        frozen_since=(),
        metrics={"accuracy": 0.5},
        evaluated_at=step,
        predict=predict,
    )


def decided(step: int, predict: Callable[[int], float], interval_s: float = 1.0) -> dict[str, Any]:
    """Return a decision's record."""
    fields = decision_fields(
        context(step, predict), num_frozen=1, reason="one", interval_s=interval_s
    )
    return {"kind": "decision", "step": step, "elapsed_s": 0.0, **fields}


def trained(step: int) -> dict[str, Any]:
    """Return a step's record."""
    return {"kind": "step", "step": step, "elapsed_s": 0.0}


def write(folder: Path, *records: dict[str, Any]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "records.jsonl").write_text(text)


def predicted(folder: Path) -> dict[int, list[float]]:
    """Return what the decisions read from a folder predict, by step."""
    return {
        one.context.step: [one.context.predict(num) for num in range(NUM_LAYERS + 1)]
        for one in read_decisions(folder)
    }


def test_each_decision_holds_what_was_predicted_then(tmp_path: Path) -> None:
    write(tmp_path, *(decided(step, lambda num, step=step: 9.0 + step - num) for step in (0, 5)))
    assert predicted(tmp_path) == {0: [9.0, 8.0, 7.0, 6.0, 5.0], 5: [14.0, 13.0, 12.0, 11.0, 10.0]}
    seen = read_decisions(tmp_path)[1].context
    assert (seen.mean_learning_rate, seen.evaluated_at) == (0.75, 5)


def test_predictions_that_take_long_are_recorded_at_the_start_and_after_long_intervals() -> None:
    def slow(num_frozen: int) -> float:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return 1.0

    wanted = [1.0] * (NUM_LAYERS + 1)
    assert decided(0, slow, interval_s=0.0)["predicted_step_s"] == wanted
    assert decided(5, slow, interval_s=1.0)["predicted_step_s"] is None
    assert decided(5, slow, interval_s=1000.0)["predicted_step_s"] == wanted


def test_a_decision_without_predictions_has_those_of_the_last_one_with_some(
    tmp_path: Path,
) -> None:
    records = [decided(step, lambda num, step=step: 1.0 + step) for step in (0, 2, 4, 6)]
    for record in records[1], records[3]:
        record["predicted_step_s"] = None
    write(tmp_path, *records)
    assert [own[0] for own in predicted(tmp_path).values()] == [1.0, 1.0, 5.0, 5.0]


def test_records_of_older_versions_are_read(tmp_path: Path) -> None:
    records = [decided(step, lambda num: 2.0) for step in (0, 5)]
    records[1]["predicted_step_s"] = None
    for record in records:
        del record["mean_learning_rate"], record["evaluated_at"]
    write(tmp_path, *records)
    assert [own[0] for own in predicted(tmp_path).values()] == [2.0, 2.0]
    assert read_decisions(tmp_path)[1].context.evaluated_at is None


@pytest.mark.parametrize(("later", "steps"), [(8, [0, 3, 6, 8]), (10, [0, 3, 6, 10])])
def test_a_resumed_run_s_decisions_replace_those_it_has_given_up(
    tmp_path: Path, later: int, steps: list[int]
) -> None:
    """Trained to step 14, deciding every 3; resumed from step 8, where it decides at another."""

    def run(begin: int, end: int, at: set[int]) -> list[dict[str, Any]]:
        return [
            record
            for step in range(begin, end)
            for record in ([decided(step, float)] if step in at else []) + [trained(step)]
        ]

    # It is written beside training, so its record is late and begins no branch.
    checkpoint = {"kind": "checkpoint", "step": 1, "elapsed_s": 0.0}
    write(tmp_path, *run(0, 14, {0, 3, 6, 9, 12}), *run(8, 12, {later}), checkpoint)
    assert [one.context.step for one in read_decisions(tmp_path)] == steps


def test_decisions_of_steps_with_a_growing_batch_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {**decided(0, float), "scales_batch": True})
    with pytest.raises(ValueError, match="with scale_batch=True a step trained more samples the"):
        read_decisions(tmp_path)


def test_a_run_resumed_with_another_interval_has_one_line_of_decisions(tmp_path: Path) -> None:
    """Its decisions 9 and 12 were of steps that the resumed run trained anew."""
    for interval, num_steps in ((3, 14), (4, 10)):
        with tiny_trainer(
            freeze=Linear(),
            folder=tmp_path,
            epochs=4,
            global_batch_size=6,
            checkpoint_every_steps=8,
            resume="auto",
            freeze_interval_steps=interval,
        ) as trainer:
            for _ in range(num_steps):
                trainer.step()
    assert [one.context.step for one in read_decisions(tmp_path)] == [0, 3, 6, 8, 12, 16]

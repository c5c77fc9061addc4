"""Prove that decisions are read as they were, and that their table says all that changed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freeze import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    Guarded,
    LayerStats,
    Linear,
    NeverFreeze,
    as_policy,
    checked_decision,
)
from pipetransformer.report import Record, read_decisions
from pipetransformer.report.freeze_sections import decisions_section
from pipetransformer.report.records import decision_fields

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


def recorded(policy: FreezePolicy, num: int, max_steps: int = 20) -> list[Record]:
    """Ask a policy at so many steps in a row, and do what it says."""
    found, since, resting = list[Record](), tuple[int, ...](), tuple[int, ...]()
    for step in range(num):
        seen = dataclasses.replace(context(step, lambda num: 1.0), max_steps=max_steps)
        seen = seen.as_frozen(since, resting)
        answer = checked_decision(policy, seen)
        since = since[: answer.num_frozen] + (step,) * (answer.num_frozen - len(since))
        resting = answer.resting
        decided = {"num_frozen": answer.num_frozen, "reason": answer.reason}
        fields = decision_fields(seen, **decided, interval_s=0.0)
        found.append({"kind": "decision", "step": step, "elapsed_s": 0.0, **fields})
    return found


def rows(decisions: list[Record]) -> list[str]:
    """Return the page's rows, without the loss."""
    table = decisions_section(decisions).table
    return [" ".join(" ".join([*row[:4], row[5]]).split()) for row in table[1:]]


def test_equal_decisions_in_a_row_are_one_line() -> None:
    assert rows(recorded(NeverFreeze(), 1000)) == ["0 to 999 0 0 → 0 keep"]
    # Their reasons say how much of the run is done, which is no news.
    assert rows(recorded(Linear(begin=0.25, end=0.5), 20)) == [
        "0 to 4 0 0 → 0 keep: linear, at 0% of the run",
        "5 0 0 → 1 linear, at 25% of the run",
        "6 to 7 0 1 → 1 keep: linear, at 30% of the run",
        "8 0 1 → 2 linear, at 40% of the run",
        "9 0 2 → 2 keep: linear, at 45% of the run",
        "10 0 2 → 3 linear, at 50% of the run",
        "11 to 19 0 3 → 3 keep: linear, at 55% of the run",
    ]


def test_another_reason_is_another_line() -> None:
    policy = Guarded(Linear(begin=0.25, end=0.5), warmup=4, patience=2, at_once=1)
    assert [line.split(" → ")[1] for line in rows(recorded(policy, 8))] == [
        "0 keep: warm-up until step 4",
        "0 keep: linear, at 20% of the run",
        "0 keep: waiting, 1 of 2: linear, at 25% of the run",
        "1 linear, at 30% of the run",
        "1 keep: linear, at 35% of the run",
    ]


def other_rests(seen: FreezeContext) -> FreezeDecision:
    resting = (2,) if seen.step < 4 else (3,)
    return FreezeDecision(0, "the other one trains", resting)


def test_layers_that_rest_are_told() -> None:
    assert rows(recorded(as_policy(other_rests), 8)) == [
        "0 0 0 → 0 the other one trains",
        "1 to 3 0 0 → 0 2 keep: the other one trains",
        "4 0 0 → 0 2 the other one trains",
        "5 to 7 0 0 → 0 3 keep: the other one trains",
    ]

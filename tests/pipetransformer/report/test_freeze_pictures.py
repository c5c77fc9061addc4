"""The table of decisions says all that changed, and repeats nothing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from torch import nn

from freeze import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    Guarded,
    Linear,
    NeverFreeze,
    Shadow,
    as_policy,
    checked_decision,
)
from pipetransformer import Trainer
from pipetransformer.cli import main
from pipetransformer.report import RecordedDecision, decision_table
from tests.models import tiny_data, tiny_model
from tests.pipetransformer.report.test_decision_records import context


def decided(policy: FreezePolicy, num: int, max_steps: int = 20) -> list[RecordedDecision]:
    """Ask a policy at so many steps in a row, and do what it says."""
    found, since, resting = [], tuple[int, ...](), tuple[int, ...]()
    for step in range(num):
        seen = dataclasses.replace(context(step, lambda num: 1.0), max_steps=max_steps)
        seen = seen.as_frozen(since, resting)
        answer = checked_decision(policy, seen)
        since = since[: answer.num_frozen] + (step,) * (answer.num_frozen - len(since))
        resting = answer.resting
        found.append(RecordedDecision(seen, answer.num_frozen, answer.reason))
    return found


def rows(decisions: list[RecordedDecision]) -> list[str]:
    return [" ".join(line.split()) for line in decision_table(decisions).splitlines()[1:]]


def test_equal_decisions_in_a_row_are_one_line() -> None:
    assert rows(decided(NeverFreeze(), 1000)) == ["0 to 999 0 0 -> 0 keep"]
    # Their reasons say how much of the run is done, which is no news.
    assert rows(decided(Linear(begin=0.25, end=0.5, max_frozen=2), 20)) == [
        "0 to 4 0 0 -> 0 keep: linear, at 0% of the run",
        "5 0 0 -> 1 linear, at 25% of the run",
        "6 to 9 0 1 -> 1 keep: linear, at 30% of the run",
        "10 0 1 -> 2 linear, at 50% of the run",
        "11 to 19 0 2 -> 2 keep: linear, at 55% of the run",
    ]


def test_another_reason_is_another_line() -> None:
    policy = Guarded(Linear(begin=0.25, end=0.5, max_frozen=2), warmup=4, patience=2, at_once=1)
    assert [line.split(" -> ")[1] for line in rows(decided(policy, 9))] == [
        "0 keep: warm-up until step 4",
        "0 keep: linear, at 20% of the run",
        "0 keep: waiting, 1 of 2: linear, at 25% of the run",
        "1 linear, at 30% of the run",
        "1 keep: linear, at 35% of the run",
    ]


def test_a_shadow_s_lines_say_what_would_have_changed_and_when() -> None:
    shadow = Shadow(Linear(begin=0.25, end=0.5, max_frozen=4))
    said = [line.split(":")[:2] for line in rows(decided(shadow, 20))]
    assert [f"{line}:{would}" for line, would in said] == [
        "0 to 4 0 0 -> 0 keep: would have 0 frozen",
        "5 0 0 -> 0 keep: would have 1 frozen",
        "6 0 0 -> 0 keep: would have 1 frozen",
        "7 0 0 -> 0 keep: would have 2 frozen",
        "8 0 0 -> 0 keep: would have 2 frozen",
        "9 0 0 -> 0 keep: would have 3 frozen",
        "10 0 0 -> 0 keep: would have 4 frozen",
        "11 to 19 0 0 -> 0 keep: would have 4 frozen",
    ]


def other_rests(seen: FreezeContext) -> FreezeDecision:
    resting = (2,) if seen.step < 4 else (3,)
    return FreezeDecision(0, "the other one trains", resting)


def test_layers_that_rest_are_told() -> None:
    assert rows(decided(as_policy(other_rests), 8)) == [
        "0 0 0 -> 0 the other one trains",
        "1 to 3 0 0 -> 0 2 keep: the other one trains",
        "4 0 0 -> 0 2 the other one trains",
        "5 to 7 0 0 -> 0 3 keep: the other one trains",
    ]
    shadowed = rows(decided(Shadow(as_policy(other_rests)), 8))
    assert [line.split()[0] for line in shadowed] == ["0", "1", "4", "5"]
    assert "keep: would have 0 frozen and [3] resting: the other one trains" in shadowed[2]


def test_a_run_is_reported_with_what_its_shadow_would_have_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=Shadow(Linear(begin=0.4, max_frozen=1)),
        folder=tmp_path,
        progress=False,
        epochs=2,
        global_batch_size=6,
        freeze_interval_steps=1,
    ) as trainer:
        trainer.fit()
    assert main(["report", str(tmp_path), "--freeze"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == "steps epoch frozen rested loss reason"
    assert [line.split()[0] for line in said[1:4]] == ["0", "4", "5"]
    assert said[1].endswith("would have 0 frozen: keep: linear, at 0% of the run")
    assert said[2].endswith("keep: would have 1 frozen: linear, at 40% of the run")

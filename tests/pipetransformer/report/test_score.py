"""Prove that a policy, scored on a run's records, decides as it did while the run trained."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.plan import PipelinePlan
from freeze import (
    AlphaSchedule,
    AutoFreeze,
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    FreezeSchedule,
    Guarded,
    Linear,
    NeverFreeze,
    PaperRule,
    Plasticity,
    QuietUpdates,
    as_policy,
)
from pipetransformer import PlanSituation, fastest_plan
from pipetransformer.cli import main
from pipetransformer.report import read_decisions, recorded_score, score
from pipetransformer.report import records as decisions_module
from tests.helpers.marks import slow
from tests.helpers.models import tiny_model, tiny_trainer

ALL = ("accumulated_gradient", "relative_update", "probe_change", "probe_cka")


def train(
    folder: Path, policy: FreezePolicy, *, model: nn.Module | None = None, **changes: Any
) -> None:
    """Train a model, or the tiny one, in this process, deciding every 3 of 50 steps."""
    settings: dict[str, Any] = {"epochs": 10, "freeze_interval_steps": 3, **changes}
    with tiny_trainer(
        tiny_model() if model is None else model,
        freeze=policy,
        folder=folder,
        global_batch_size=6,
        micro_batches=2,
        probe_samples=8,
        **settings,
    ) as trainer:
        trainer.fit()


POLICIES = {
    "paper": lambda: PaperRule(0.2),
    "auto": lambda: AutoFreeze(),
    "quiet": lambda: QuietUpdates(2e-3, begin=0.2),
    "plasticity": lambda: Plasticity(0.9, window=2),
    "alpha": lambda: AlphaSchedule(0.2),
    "linear": lambda: Linear(),
}


@pytest.mark.parametrize("name", [n if n in ("auto", "plasticity") else slow(n) for n in POLICIES])
def test_a_run_s_own_policy_scores_as_the_run(tmp_path: Path, name: str) -> None:
    train(tmp_path, POLICIES[name]())
    decisions = read_decisions(tmp_path)
    assert [one.context.step for one in decisions] == list(range(0, 50, 3))
    ours, own = score(decisions, POLICIES[name]()), recorded_score(decisions)
    assert ours.frozen == own.frozen and ours.unseen == 0
    assert max(own.frozen.values()) > 0
    assert ours.train_s == own.train_s
    # A schedule's reason says that it keeps what is frozen, too.
    assert ours.reasons == own.reasons


def test_seconds_add_up_by_what_each_decision_predicted(tmp_path: Path) -> None:
    train(tmp_path, NeverFreeze(), plan=getting_slower)
    decisions = read_decisions(tmp_path)
    found = score(decisions, FreezeSchedule([0, 0, 2]))
    # Epoch 2 begins with step 10, the next decision is before step 12.
    assert found.frozen[9] == 0 and found.frozen[12] == 2
    spans = {step: min(3, 50 - step) for step in range(0, 50, 3)}
    early = sum(num * (100.0 + step) for step, num in spans.items() if step < 12)
    late = sum(num * (80.0 + step) for step, num in spans.items() if step >= 12)
    assert found.train_s == pytest.approx(early + late)
    assert found.unfrozen_s == sum(num * (100.0 + step) for step, num in spans.items())


def getting_slower(situation: PlanSituation) -> PipelinePlan:
    """Plan as ever; predict 100 s a step, 1 s more with each, and 10 s less by frozen layer."""
    seconds = 100.0 + situation.step - 10 * situation.request.num_frozen
    return replace(fastest_plan(situation), predicted_step_s=seconds)


def test_filling_the_cache_is_charged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def priced(situation: PlanSituation) -> PipelinePlan:
        request = situation.request
        frozen_s = 0.9 if request.prefix_cached_s is None else 0.5
        seconds = frozen_s if request.num_frozen else 1.0
        return replace(fastest_plan(situation), predicted_step_s=seconds)

    monkeypatch.setattr(decisions_module, "_SPARE_S", math.inf)
    model = nn.Sequential(*(Slow() for _ in range(3)), nn.Linear(8, 3, dtype=torch.float64))
    settings: dict[str, Any] = {"epochs": 4, "freeze_interval_steps": None, "plan": priced}
    train(tmp_path, NeverFreeze(), model=model, **settings)
    decisions = read_decisions(tmp_path)
    for begin, seconds in {
        4: [1.0, 1.0, 1.0, 1.0],
        3: [1.0, 1.0, 1.0, 0.9],
        2: [1.0, 1.0, 0.9, 0.5],
        1: [1.0, 0.9, 0.5, 0.5],
    }.items():
        found = score(decisions, FreezeSchedule({begin: 2}))
        assert found.share == pytest.approx(sum(seconds) / 4)
    deeper = score(decisions, FreezeSchedule({1: 1, 2: 2}))
    assert deeper.share == pytest.approx((1.0 + 0.9 + 0.5 + 0.5) / 4)


class Slow(nn.Module):
    """A layer that takes much longer to compute than its output to read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(0.002)
        return hidden + torch.tanh(self.inner(hidden))


def test_a_policy_is_not_asked_about_layers_that_the_run_had_frozen(tmp_path: Path) -> None:
    train(tmp_path, FreezeSchedule([0, 0, 0, 0, 2]), signals=["accumulated_gradient"])
    decisions = read_decisions(tmp_path)
    found = score(decisions, AutoFreeze(0))
    assert set(found.frozen.values()) == {0} and found.unseen > 0
    assert found.reasons[48] == "not asked: the run had more layers frozen or resting"


def two_at_a_time(context: FreezeContext) -> FreezeDecision:
    """Let all layers rest but the lowest and another one, which takes turns."""
    first = 1 + context.step // 3 % 2
    resting = tuple(i for i in range(1, context.num_layers) if i != first)
    return FreezeDecision(0, f"rested {context.resting}", resting)


def test_layers_that_rest_are_the_policy_s_own_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    train(tmp_path, as_policy(two_at_a_time))
    decisions = read_decisions(tmp_path)
    ours = score(decisions, as_policy(two_at_a_time))
    assert ours.reasons == recorded_score(decisions).reasons and ours.unseen == 0
    # Another policy sees none of them at rest, and there are no signals of those that were.
    waiting = score(decisions, Guarded(FreezeSchedule({2: 3}), patience=3))
    assert waiting.frozen[15] == 0 and waiting.frozen[18] == 3 and not waiting.rests
    assert score(decisions, PaperRule(1 / 2)).unseen == len(decisions) - 1
    assert main(["score", str(tmp_path), "--policy", f"{__name__}:two_at_a_time"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(": layers rest")[0] for line in said[4:]] == [
        "the run",
        f"{__name__}:two_at_a_time",
    ]


def test_a_missing_signal_is_named(tmp_path: Path) -> None:
    train(tmp_path, NeverFreeze())
    with pytest.raises(ValueError, match=r"AutoFreeze needs \['accumulated_gradient'\]"):
        score(read_decisions(tmp_path), AutoFreeze())


def never_ready(context: FreezeContext) -> int:
    """Fail at every decision, as a user's policy may."""
    raise KeyError("not ready")


def test_a_policy_that_fails_leaves_the_others_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    train(tmp_path, NeverFreeze())
    raising = f"{__name__}:never_ready"
    command = ["score", str(tmp_path), "--policy", "auto", raising, "alpha:1/2"]
    assert main(command) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[:6]] == [
        "policy", "the", "none", "alpha:1/2", "auto", raising,
    ]  # fmt: skip
    assert [row.split()[1:] for row in rows[4:6]] == [["failed"], ["failed"]]
    assert rows[6].startswith("auto: AutoFreeze needs ['accumulated_gradient'], which the run")
    assert rows[7].startswith(f"{raising}: the freeze policy never_ready raised KeyError at step")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none"]["share"] == 1.0
    assert "not ready" in found[raising]["error"]


def test_the_command_prints_the_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    train(tmp_path / "run", NeverFreeze(), signals=ALL)
    policies = ["--policy", "auto", "alpha:1/2", "paper:1/3"]
    run = str(tmp_path / "run")
    assert main(["score", run, *policies]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "policy", "the", "none", "auto", "alpha:1/2", "paper:1/3",
    ]  # fmt: skip
    assert main(["score", run, *policies, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none"]["share"] == pytest.approx(1.0) and found["the run"]["frozen"]["48"] == 0
    assert main(["score", run, "--policy", "nothing:at_all"]) == 1
    assert "names no freeze policy" in capsys.readouterr().err
    assert main(["score", str(tmp_path)]) == 1
    assert "holds no records.jsonl" in capsys.readouterr().err

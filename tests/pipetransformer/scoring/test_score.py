"""Prove that a policy, scored on a run's records, decides as it did while the run trained."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from freeze import (
    AlphaSchedule,
    AutoFreeze,
    FreezePolicy,
    Linear,
    NeverFreeze,
    PaperRule,
    Plasticity,
    QuietUpdates,
    Shadow,
)
from pipetransformer import Trainer
from pipetransformer.cli import main
from pipetransformer.report import read_decisions
from pipetransformer.scoring import recorded_score, score
from tests.models import tiny_data, tiny_model

ALL = ("accumulated_gradient", "relative_update", "probe_change", "probe_cka")


def train(folder: Path, policy: FreezePolicy, **settings: Any) -> None:
    """Train the tiny model in this process, deciding every 3 of 50 steps."""
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=policy,
        folder=folder,
        epochs=10,
        global_batch_size=6,
        micro_batches=2,
        progress=False,
        freeze_interval_steps=3,
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


@pytest.mark.parametrize("name", POLICIES)
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


def test_a_policy_that_froze_nothing_else_scores_as_a_shadow_s(tmp_path: Path) -> None:
    train(tmp_path, Shadow(AutoFreeze()), signals=ALL)
    decisions = read_decisions(tmp_path)
    found = score(decisions, AutoFreeze())
    wanted = {one.context.step: one.reason for one in decisions}
    for step, num_frozen in found.frozen.items():
        assert wanted[step].startswith(f"keep: would have {num_frozen} frozen")


def test_seconds_add_up_by_steps_and_depth(tmp_path: Path) -> None:
    train(tmp_path, NeverFreeze())
    decisions = read_decisions(tmp_path)
    predict = decisions[0].context.predict
    found = score(decisions, AlphaSchedule(0.5, start_epoch=2, max_frozen=2))
    # Epoch 2 begins with step 10, the next decision is before step 12.
    assert found.frozen[9] == 0 and found.frozen[12] == 2
    assert found.train_s == pytest.approx(12 * predict(0) + 38 * predict(2))
    assert found.unfrozen_s == pytest.approx(50 * predict(0))


def test_a_policy_is_not_asked_about_layers_that_the_run_had_frozen(tmp_path: Path) -> None:
    train(tmp_path, AlphaSchedule(0.5, start_epoch=4), signals=["accumulated_gradient"])
    decisions = read_decisions(tmp_path)
    found = score(decisions, AutoFreeze(0))
    assert set(found.frozen.values()) == {0} and found.unseen > 0
    assert found.reasons[48] == "not asked: the run had more layers frozen"


def test_a_missing_signal_is_named(tmp_path: Path) -> None:
    train(tmp_path, NeverFreeze())
    with pytest.raises(ValueError, match=r"AutoFreeze needs \['accumulated_gradient'\]"):
        score(read_decisions(tmp_path), AutoFreeze())


def test_the_commands_print_and_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    train(tmp_path / "run", NeverFreeze(), signals=ALL)
    picture = tmp_path / "score.png"
    policies = ["--policy", "auto", "alpha:1/2", "paper:1/3"]
    run = str(tmp_path / "run")
    assert main(["score", run, *policies, "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "policy", "the", "none", "auto", "alpha:1/2", "paper:1/3",
    ]  # fmt: skip
    assert picture.stat().st_size > 10_000
    assert main(["score", run, *policies, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none"]["share"] == pytest.approx(1.0) and found["the run"]["frozen"]["48"] == 0
    assert main(["report", run, "--freeze"]) == 0
    assert "freezing.png" in capsys.readouterr().out
    assert (tmp_path / "run" / "freezing.png").stat().st_size > 10_000
    assert main(["score", run, "--policy", "nothing:at_all"]) == 1
    assert "names no freeze policy" in capsys.readouterr().err
    assert main(["score", str(tmp_path)]) == 1
    assert "holds no records.jsonl" in capsys.readouterr().err

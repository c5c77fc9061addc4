"""Prove that a run's end says what was saved, and what a policy saw that froze nothing."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipetransformer import FreezeDecision, FreezeSchedule, Trainer
from pipetransformer.report import RECORDS_FILE, read_records
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model
from tests.helpers.pool import Pool


def train(freeze: Any, folder: Path | None = None, **settings: Any) -> Any:
    usual: dict[str, Any] = {"epochs": 3, "global_batch_size": 8, "prefix_chunk": 1}
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=freeze,
        folder=folder,
        **{**usual, **settings},
    ) as trainer:
        return trainer.fit()


# One more layer each epoch: no row is ever read as it is, and all are used.
def test_rows_that_are_computed_on_from_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = train(FreezeSchedule([0, 1, 2]), tmp_path)
    assert (report.cache_hits, report.cache_upgrades) == (0, NUM_SAMPLES)
    assert report.cache_misses == 2 * NUM_SAMPLES
    shown = "".join(capsys.readouterr())
    assert "hits=0% (100% in part)" in shown
    assert re.search(rf"training took .*; 0 rows read, {2 * NUM_SAMPLES} computed", shown)
    steps = [one for one in read_records(tmp_path / RECORDS_FILE) if one["kind"] == "step"]
    assert sum(one["cache_upgrades"] for one in steps) == NUM_SAMPLES


PREDICTED = r" (\S+ less|no less) than {} \((\S+) ± (\S+) s\)"


@pytest.mark.parametrize("epochs", [[0, 2, 2], [2, 2, 2], [0, 0, 0]])
def test_the_end_says_once_what_was_saved_beside_the_run_s_own_steps(
    epochs: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = train(FreezeSchedule(epochs), tmp_path, global_batch_size=4)
    shown = "".join(capsys.readouterr())
    assert shown.count("training took") == (epochs != [0, 0, 0])
    steps = [one for one in read_records(tmp_path / RECORDS_FILE) if one["kind"] == "step"]
    per_epoch = len(steps) // 3
    unfrozen = re.search(PREDICTED.format("unfrozen"), shown)
    assert (unfrozen is not None) == (epochs == [0, 2, 2])
    if unfrozen is not None:
        told = steps[1:per_epoch]  # The first one also warms up.
        each_s = sum(one["seconds"] for one in told) / sum(one["samples"] for one in told)
        assert float(unfrozen[2]) == pytest.approx(each_s * report.samples, rel=0.01)
    computed = re.search(PREDICTED.format("with all rows computed"), shown)
    assert (computed is not None) == (epochs != [0, 0, 0])
    if computed is not None:
        first = per_epoch if epochs == [0, 2, 2] else 0
        told, read = steps[first + 1 : first + per_epoch], steps[first + per_epoch :]
        each_s = sum(one["seconds"] for one in told) / sum(one["samples"] for one in told)
        more_s = sum(one["samples"] * each_s - one["seconds"] for one in read)
        assert float(computed[2]) == pytest.approx(report.seconds + more_s, rel=0.01)


def test_the_end_says_what_came_from_rows_of_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"cache_keep": True, "cache_folder": tmp_path, "epochs": 2}
    for others in (0, NUM_SAMPLES):
        report = train(FreezeSchedule([2]), **kept)
        assert report.cache_hits_of_others == others
        assert report.cache_hits == NUM_SAMPLES + others
        text = f"{report.cache_hits} rows read" + (f" ({others} of other runs)" if others else "")
        assert f"{text}, {report.cache_misses} computed" in "".join(capsys.readouterr())


def test_rows_that_are_computed_ahead_are_not_of_other_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"cache_keep": True, "cache_folder": tmp_path, "epochs": 2}
    report = train(FreezeSchedule([2]), **kept, prefix_chunk=16)
    assert report.cache_hits_of_others == 0
    assert report.cache_hits > NUM_SAMPLES > report.cache_misses
    shown = "".join(capsys.readouterr())
    assert f"; {NUM_SAMPLES} rows read, {NUM_SAMPLES} computed" in shown


def upgraded_at_once() -> Any:
    settings = {"pipeline_length": 1, "progress": False}
    report = train(FreezeSchedule([0, 1, 2]), **settings)
    return report.cache_upgrades, report.cache_misses


def test_replicas_add_up_what_each_has_computed_on_from(two_ranks: Pool) -> None:
    found = two_ranks.run(upgraded_at_once)
    assert found == [(NUM_SAMPLES, 2 * NUM_SAMPLES)] * 2


def too_soon(context: Any) -> FreezeDecision:
    return FreezeDecision(0, f"{context.step} steps are too few")


@pytest.mark.parametrize("shows", [True, False])
def test_a_policy_that_froze_nothing_says_what_it_saw(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, shows: bool
) -> None:
    caplog.set_level(logging.INFO, logger="pipetransformer")
    report = train(too_soon, progress=shows, eval_dataset=tiny_data())
    text = "".join(capsys.readouterr()) if shows else caplog.text
    steps = -(-NUM_SAMPLES // 8)
    says = f"asked 3 times, and said last, at step {2 * steps}: .*{2 * steps} steps are too few"
    found = re.search(rf"nothing was frozen: the policy was {says}; it saw (.*)", text)
    assert found is not None
    assert re.search(r"loss \S+, .*accuracy \S+.*, gradient_norm \S+ to \S+", found[1])
    assert report.transitions == []


@pytest.mark.parametrize("freeze", [None, FreezeSchedule([0, 1])], ids=["none", "some"])
def test_others_say_nothing_of_it(capsys: pytest.CaptureFixture[str], freeze: Any) -> None:
    train(freeze)
    assert "nothing was frozen" not in "".join(capsys.readouterr())


def test_the_bar_ends_with_the_accuracy_of_the_last_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Trainer(
        tiny_model(),
        tiny_data(),
        eval_dataset=tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        epochs=2,
        global_batch_size=6,
    ) as trainer:
        report = trainer.fit()
    shown = re.findall(r"acc=([^,]+),", capsys.readouterr().err)
    assert shown[-1] == f"{report.metrics['accuracy']:.3f}"

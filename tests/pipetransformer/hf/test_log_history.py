"""Prove that what a run has logged outlives torn, changed and lost files, and full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers

from pipetransformer.errors import CallbackError
from pipetransformer.hf import log_history
from pipetransformer.hf.log_history import LogHistory
from tests.helpers.hf_runs import SAVES, KilledAt, StopAt, made

History = list[dict[str, Any]]


def stopped(folder: Path, options: dict[str, Any]) -> None:
    """Train to step 4, at which a checkpoint is written and an epoch ends."""
    with made(folder, options=options, callbacks=[StopAt(4)]) as trainer:
        trainer.train()


def resumed(folder: Path, options: dict[str, Any]) -> History:
    """Go on to the end; return what was logged, but for what the whole run took."""
    with made(folder, options=options) as trainer:
        trainer.train(resume_from_checkpoint=True)
        history: History = trainer.state.log_history
    return [entry for entry in history if "train_runtime" not in entry]


def whole(folder: Path, options: dict[str, Any]) -> History:
    with made(folder, options=options) as trainer:
        trainer.train()
        history: History = trainer.state.log_history
    return [entry for entry in history if "train_runtime" not in entry]


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stop a run, and give its folder, which nobody may change."""
    folder = tmp_path_factory.mktemp("stopped")
    stopped(folder, SAVES)
    return folder


@pytest.fixture(scope="module")
def whole_history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Return what the same run logs that is not stopped."""
    return whole(tmp_path_factory.mktemp("whole"), SAVES)


def assert_same(found: History, expected: History) -> None:
    """Compare entries; another K and M may have been chosen, so that last bits differ."""
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_digit(path: Path) -> None:
    text = path.read_text()
    at = text.index('"loss": 1.') + len('"loss": ')
    path.write_text(f"{text[:at]}3{text[at + 1 :]}")


def history_in(folder: Path) -> History:
    lines = (folder / "log_history.jsonl").read_text().splitlines()
    return [json.loads(line)["log"] for line in lines]


@pytest.mark.parametrize("damage", [tear, Path.unlink])
def test_transformers_own_file_costs_a_run_nothing(
    tmp_path: Path, stopped_run: Path, whole_history: History, damage: Any
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")
    path = tmp_path / "run" / "trainer_state.json"
    damage(path)
    assert_same(resumed(tmp_path / "run", SAVES), whole_history)
    assert_same(history_in(tmp_path / "run"), whole_history)
    # It is what transformers reads again.
    assert transformers.TrainerState.load_from_json(str(path)).global_step == 8


@pytest.mark.parametrize("damage", [tear, change_a_digit])
def test_a_damaged_line_is_named_and_the_others_are_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stopped_run: Path,
    whole_history: History,
    damage: Any,
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")
    damage(tmp_path / "run" / "log_history.jsonl")
    found = resumed(tmp_path / "run", SAVES)
    (warning,) = [text for text in caplog.messages if "is damaged, and left out" in text]
    number = int(warning.partition(", line ")[2].split()[0])
    kept = [*whole_history[: number - 1]]
    if damage is change_a_digit:
        kept += whole_history[number:]
    else:  # What stood behind the torn line is lost with it.
        kept += [entry for entry in whole_history if entry["step"] > 4]
    assert_same(found, kept)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_killed_run_has_what_it_logged_up_to_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole_history: History, is_lost: bool
) -> None:
    with pytest.raises(CallbackError, match="killed"):
        with made(tmp_path, options=SAVES, callbacks=[KilledAt(6)]) as trainer:
            trainer.train()
    # The checkpoint is step 4's, so that step 5 is trained and logged again.
    assert [entry["step"] for entry in history_in(tmp_path)] == [1, 2, 3, 4, 4, 5]
    if is_lost:
        (tmp_path / "log_history.jsonl").unlink()
    found = resumed(tmp_path, SAVES)
    if is_lost:
        assert "what was logged until step 4 is lost: [Errno 2]" in caplog.text
        assert [entry["step"] for entry in found] == [5, 6, 7, 8, 8]
    else:
        assert_same(found, whole_history)


def test_a_script_s_numbers_are_kept_whatever_they_are_named(tmp_path: Path) -> None:
    history = LogHistory(tmp_path)
    entry = {"check": 1.0, "loss": float("nan"), "step": 3}
    history.begin([entry])
    history.add({**entry, "step": 4})
    assert str(LogHistory(tmp_path).read(3)) == str([entry])


def test_a_full_disk_costs_what_was_logged_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "log_history.jsonl")
    with mock.patch.object(log_history, "LineFile") as lines:
        lines.return_value.append.side_effect = full
        with made(tmp_path, options=SAVES) as trainer:
            assert trainer.train().global_step == 8
    lost = [text for text in caplog.messages if "what was logged is not kept" in text]
    assert len(lost) == 1 and lost[0].endswith("'log_history.jsonl'; training goes on")

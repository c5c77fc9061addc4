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

from pipetransformer.hf import kept_history
from pipetransformer.hf.kept_history import keep_history
from tests.helpers.hf_runs import SAVES, StopAt, made

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


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change_a_digit(path: Path) -> None:
    text = path.read_text()
    at = text.index('"loss": 1.') + len('"loss": ')
    path.write_text(f"{text[:at]}3{text[at + 1 :]}")


@pytest.mark.parametrize("damage", [tear, empty, change_a_digit, Path.unlink])
@pytest.mark.parametrize("name", ["trainer_state.json", "log_history.json"])
def test_a_run_goes_on_with_what_it_had_logged_whatever_became_of_its_files(  # noqa: PLR0913
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stopped_run: Path,
    whole_history: History,
    name: str,
    damage: Any,
) -> None:
    shutil.copytree(stopped_run, tmp_path / "run")
    damage(tmp_path / "run" / name)
    assert_same(resumed(tmp_path / "run", SAVES), whole_history)
    warnings = [text for text in caplog.messages if "is taken from records.jsonl" in text]
    if name == "log_history.json":
        assert len(warnings) == 1 and name in warnings[0]
    else:
        assert not warnings
    # It is what transformers reads again.
    path = tmp_path / "run" / "trainer_state.json"
    assert transformers.TrainerState.load_from_json(str(path)).global_step == 8


@pytest.mark.parametrize(
    "options",
    [
        {"logging_steps": 3},
        {"logging_strategy": "epoch"},
        {"logging_steps": 3, "logging_first_step": True, "eval_strategy": "no"},
    ],
)
def test_what_records_tell_is_what_was_logged(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {**SAVES, **options, "save_steps": 4}
    stopped(tmp_path, options)
    path = tmp_path / "log_history.json"
    kept = json.loads(path.read_text())["content"]["history"]
    path.unlink()
    found = resumed(tmp_path, options)[: len(kept)]
    assert kept and found == kept


def test_steps_between_the_last_file_and_the_checkpoint_are_taken_from_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped_run: Path, whole_history: History
) -> None:
    # Killed after the checkpoint of step 4 was complete, and before its `on_save`.
    shutil.copytree(stopped_run, tmp_path / "run")
    path = tmp_path / "run" / "log_history.json"
    history = json.loads(path.read_text())["content"]["history"]
    older = [entry for entry in history if entry["step"] <= 2]
    keep_history(path.parent, transformers.TrainerState(global_step=2, log_history=older))
    assert_same(resumed(tmp_path / "run", SAVES), whole_history)
    assert "is taken from records.jsonl" not in caplog.text


def test_without_any_file_a_run_goes_on_and_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stopped_run: Path
) -> None:
    shutil.copytree(stopped_run, tmp_path, dirs_exist_ok=True)
    for name in ("log_history.json", "trainer_state.json", "records.jsonl"):
        (tmp_path / name).unlink()
    assert [entry["step"] for entry in resumed(tmp_path, SAVES)] == [5, 6, 7, 8, 8]
    assert "is taken from records.jsonl" in caplog.text


def test_a_full_disk_costs_what_was_logged_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with mock.patch.object(kept_history, "replace_file", refuse):
        with made(tmp_path, options=SAVES) as trainer:
            assert trainer.train().global_step == 8
    assert "is not kept: [Errno 28] No space left on device: '" in caplog.text
    assert "log_history.json'; training goes on" in caplog.text


@pytest.mark.parametrize("asked", ["none", "tensorboard"])
def test_tensorboard_s_files_are_written_where_they_are_asked_for(
    tmp_path: Path, asked: str
) -> None:
    with made(tmp_path, options={"report_to": asked}) as trainer:
        trainer.train()
    found = [path for path in tmp_path.rglob("*") if "tfevents" in path.name]
    assert bool(found) is (asked == "tensorboard")

"""Prove when a run continues what its folder holds, and when it refuses the folder."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.optim import SGD

from pipetransformer import Trainer, adamw
from pipetransformer.checkpoint import resume as resume_module
from pipetransformer.checkpoint.resume import lock_folder, note_launchers, resumes
from pipetransformer.checks.run_checks import check_world
from pipetransformer.config import TrainConfig
from pipetransformer.model import NamedParameters
from pipetransformer.processes.world import connect
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool
from tests.pipetransformer.checkpoint.test_resume import save


def config(folder: Path, resume: Any) -> TrainConfig:
    """Configure a run that saves."""
    return TrainConfig(folder=folder, checkpoint_every_epochs=1, resume=resume)


@pytest.mark.parametrize("resume", [False, "auto"])
def test_an_empty_folder_is_started_in(tmp_path: Path, resume: Any) -> None:
    assert resumes(config(tmp_path / "absent", resume)) == (resume == "auto")


@pytest.mark.parametrize("content", [[], ["journal.jsonl"], ["checkpoints/step-00000005/w"]])
def test_resume_true_insists_on_a_checkpoint(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="holds no checkpoint to continue.*resume='auto'"):
        resumes(config(tmp_path, True))
    save(tmp_path / "checkpoints", 10)
    assert resumes(config(tmp_path, True))


def test_a_folder_with_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 10)
    advice = r"already holds a run \(checkpoints\); .*resume='auto'.* resume='replace'"
    with pytest.raises(ValueError, match=advice):
        resumes(config(tmp_path, False))
    with lock_folder(tmp_path), pytest.raises(ValueError, match="is training in folder"):
        resumes(config(tmp_path, False))
    with pytest.raises(ValueError, match=advice):
        resumes(config(tmp_path, False))
    assert resumes(config(tmp_path, "auto"))


@pytest.mark.parametrize("found", ["checkpoints", "journal.jsonl"])
def test_records_without_checkpoints_are_not_said_to_be_continued(
    tmp_path: Path, found: str
) -> None:
    (tmp_path / found).mkdir()
    advice = "without checkpoints: give another folder, or resume='replace', which removes them"
    # Without checkpoints resume= is refused, too.
    with pytest.raises(ValueError, match=f"{advice}$"):
        resumes(TrainConfig(folder=tmp_path))
    with pytest.raises(ValueError, match=f"{advice}; resume='auto' starts it anew"):
        resumes(config(tmp_path, False))
    assert resumes(config(tmp_path, "auto"))


RESTARTED = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"PIPETRANSFORMER_RESTART_COUNT": "2"}]


@pytest.mark.parametrize("environment", RESTARTED, ids=str)
def test_a_restarted_process_continues_what_its_own_launcher_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not resumes(config(tmp_path, False))
    note_launchers(tmp_path, connect("cpu", timeout_s=60.0))
    (tmp_path / "journal.jsonl").touch()
    assert resumes(config(tmp_path, False))
    monkeypatch.setenv("PIPETRANSFORMER_LAUNCH", "another run that the same process launched")
    with pytest.raises(ValueError, match="holds the records of a run"):
        resumes(config(tmp_path, False))
    monkeypatch.delenv("PIPETRANSFORMER_LAUNCH")
    monkeypatch.setattr(os, "getppid", os.getpid)  # Another than it was, whichever that is.
    with pytest.raises(ValueError, match="holds the records of a run"):
        resumes(config(tmp_path, False))


def note_on_a_full_disk(folder: str) -> str:
    """Try to write down who started this run, and return what is raised."""

    def replace_file(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    world = connect("cpu", timeout_s=60.0)
    with mock.patch.object(resume_module, "replace_file", replace_file):
        try:
            note_launchers(Path(folder), world)
        except OSError as error:
            return str(error)
    return ""


def test_a_full_disk_is_told_of_on_every_rank(two_ranks: Pool, tmp_path: Path) -> None:
    for text in two_ranks.run(note_on_a_full_disk, str(tmp_path)):
        assert text.startswith("rank 0: [Errno 28] No space left on device")


@pytest.mark.parametrize("noted", [None, "", "{", "3", "[]"])
def test_a_restart_in_a_folder_that_nobody_known_began_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str | None
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "journal.jsonl").touch()
    if noted is not None:
        (tmp_path / "launchers.json").write_text(noted)
    with pytest.raises(ValueError, match="holds the records of a run"):
        resumes(config(tmp_path, False))


def test_a_process_that_was_started_twice_from_one_place_is_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("PIPETRANSFORMER_RESTART_COUNT", "0")
    note_launchers(tmp_path, connect("cpu", timeout_s=60.0))
    (tmp_path / "journal.jsonl").touch()
    with pytest.raises(ValueError, match="holds the records of a run"):
        resumes(config(tmp_path, False))


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_goes_on_with_the_longest_pipeline_that_fewer_ranks_allow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: Any
) -> None:
    set_to = dataclasses.replace(config(tmp_path, resume), pipeline_length=4)
    with pytest.raises(ValueError, match=r"length 4 does not fit|holds no checkpoint"):
        check_world(set_to, 2, 2)
    save(tmp_path / "checkpoints", 10)
    check_world(set_to, 2, 2)
    assert caplog.messages == [
        "pipeline length 4 does not fit 2 processes with 2 slots a node: the run continues with "
        "at most 2"
    ]
    with pytest.raises(ValueError, match="already holds a run"):
        check_world(dataclasses.replace(set_to, resume=False), 2, 2)


def plain_sgd(named: NamedParameters) -> SGD:
    return SGD([parameter for _, parameter in named], lr=0.1)


def begin(folder: Path, **other: Any) -> None:
    """Begin a run whose first save never comes: it is over, as if killed, after a step."""
    given = {"model": tiny_model(), "optimizer": adamw(), "data": tiny_data(), "seed": 0, **other}
    with Trainer(
        given["model"],
        given["data"],
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=given["optimizer"],
        seed=given["seed"],
        folder=folder,
        checkpoint_every_epochs=1,
        global_batch_size=6,
        resume="auto",
    ) as trainer:
        trainer.step()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 1}, r"had \{'seed': 0\}, but this run has \{'seed': 1\}"),
        ({"data": tiny_data(num_samples=12)}, r"had \{'num_samples': 26\}.*same seed and"),
        ({"optimizer": plain_sgd}, r"had \{'optimizer': .*AdamW'.*the same optimizer"),
        ({"model": tiny_model(num_blocks=2)}, "is of a model with the sublayers .*that was saved"),
    ],
    ids=["seed", "samples", "optimizer", "model"],
)
def test_another_run_s_journal_is_not_continued_where_nothing_was_saved(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    """A folder whose checkpoints were refused was trained in as long as it had none."""
    begin(tmp_path)
    begin(tmp_path)
    with pytest.raises(ValueError, match=f"the run that was begun in {tmp_path} {said}"):
        begin(tmp_path, **other)
    begin(tmp_path)


def test_a_folder_in_which_nothing_was_decided_is_anyone_s(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "journal.jsonl").unlink()
    begin(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"had \{'seed': 1\}"):
        begin(tmp_path)


def test_whose_a_folder_is_must_be_as_it_was_written(tmp_path: Path) -> None:
    begin(tmp_path)
    noted = tmp_path / "run.json"
    noted.write_bytes(noted.read_bytes().replace(b'"seed": 0', b'"seed": 1'))
    with pytest.raises(ValueError, match="run.json has SHA-256"):
        begin(tmp_path, seed=1)


def begin_as_another(folder: str, seed: int) -> str:
    try:
        begin(Path(folder), seed=seed)
    except ValueError as error:
        return str(error)
    return ""


def test_every_rank_is_refused_another_run_s_folder(two_ranks: Pool, tmp_path: Path) -> None:
    assert two_ranks.run(begin_as_another, str(tmp_path), 0) == ["", ""]
    for text in two_ranks.run(begin_as_another, str(tmp_path), 1):
        assert text.startswith(f"rank 0: the run that was begun in {tmp_path} had {{'seed': 0}}")


def test_processes_that_are_started_again_because_another_node_s_failed_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun counts a restart where a process failed, and there alone. The other nodes' processes
    # took themselves for a second run, and refused the folder that their own run was in.
    config = TrainConfig(folder=tmp_path, checkpoint_every_epochs=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not resumes(config)
    note_launchers(tmp_path, connect("cpu", timeout_s=60.0))
    (tmp_path / "journal.jsonl").touch()
    assert resumes(config)

"""Prove that one run at a time trains in a folder, and that nothing of an ended one keeps it."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from pipetransformer import Trainer
from pipetransformer.checkpoint import saver as saving
from pipetransformer.checkpoint.format import write_shards
from pipetransformer.checkpoint.resume import lock_folder
from tests.helpers.inspection import writer_of
from tests.helpers.models import tiny_data, tiny_trainer
from tests.helpers.pool import Pool, another_process


def make_trainer(folder: Path, **settings: Any) -> Trainer:
    """Build a trainer that saves into a folder, and continues what is there."""
    defaults = {
        "resume": "auto",
        "checkpoint_every_epochs": 1,
        "epochs": 2,
        "global_batch_size": 8,
    }
    return tiny_trainer(folder=folder, **{**defaults, **settings})


def train_and_wait(folder: Path, pipe: Connection) -> None:
    """Take a step, and keep the trainer until told to close it, or killed."""
    with make_trainer(folder) as trainer:
        trainer.step()
        pipe.send(os.getpid())
        pipe.poll(60.0)
    pipe.send("closed")
    pipe.poll(60.0)


def assert_free(folder: Path) -> None:
    """Lock a folder, and let go of it."""
    lock_folder(folder).close()


@contextmanager
def another_run(folder: Path) -> Iterator[tuple[BaseProcess, Connection, int]]:
    """Let another process train in a folder; yield it, a pipe to it and its id."""
    ours, theirs = multiprocessing.Pipe()
    child = another_process(train_and_wait, folder, theirs)
    child.start()
    try:
        assert ours.poll(60.0)
        yield child, ours, ours.recv()
    finally:
        child.kill()
        child.join(60.0)


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Return every file below a folder but TensorBoard's, which a thread writes at its leisure."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(
        (str(path), path.read_bytes()) for path in files if path.parent.name != "tensorboard"
    )


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_folder_in_which_another_process_trains_is_refused_until_it_ends(
    tmp_path: Path, end: str
) -> None:
    run = tmp_path / "run"
    with another_run(run) as (child, pipe, pid):
        before = contents(run)
        with pytest.raises(ValueError, match=rf"process {pid} on .* is training in .*wait for it"):
            with make_trainer(run) as trainer:
                trainer.step()
        assert contents(run) == before
        if end == "close":
            pipe.send("close")
            assert pipe.recv() == "closed"
        else:
            child.kill()
            child.join(60.0)
        with make_trainer(run) as trainer:
            trainer.fit()


def test_a_second_trainer_of_one_process_is_refused_and_the_first_keeps_the_folder(
    tmp_path: Path,
) -> None:
    with make_trainer(tmp_path) as first:
        first.step()
        for _ in range(2):
            with pytest.raises(ValueError, match=f"process {os.getpid()} on .* is training"):
                with make_trainer(tmp_path) as second:
                    second.step()
        (tmp_path / "lock").read_text()
        with pytest.raises(ValueError, match="is training in folder"):
            lock_folder(tmp_path)
        first.fit()


def step_into(folder: Path) -> str:
    """Return with what error this world is refused a folder."""
    with pytest.raises(ValueError) as caught:
        with make_trainer(folder) as trainer:
            trainer.step()
    return str(caught.value)


def test_every_rank_hears_that_the_folder_is_refused(two_ranks: Pool, tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        for message in two_ranks.run(step_into, tmp_path):
            assert message.startswith(f"rank 0: process {os.getpid()} on ")


def test_damaged_records_are_refused_on_every_rank_and_leave_the_folder_free(
    two_ranks: Pool, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_text("no record\n{}\n")
    for message in two_ranks.run(step_into, tmp_path):
        assert message.startswith("rank 0: ") and "records.jsonl" in message
    assert_free(tmp_path)


def test_a_restarted_run_waits_for_its_predecessor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = lock_folder(tmp_path)
    with pytest.raises(ValueError, match="is training in folder"):
        lock_folder(tmp_path, patience_s=0.3)
    timer = threading.Timer(0.3, first.close)
    timer.start()
    lock_folder(tmp_path, patience_s=60.0).close()
    timer.join()
    assert "waiting up to 60 s for it to end" in caplog.text


def test_a_run_that_failed_keeps_the_folder_while_it_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()

    def slow(*arguments: Any) -> Any:
        assert opened.wait(60.0)
        return write_shards(*arguments)

    monkeypatch.setattr(saving, "write_shards", slow)
    monkeypatch.setattr(saving, "_GRACE_S", 0.0)
    with pytest.raises(KeyError, match="the cause"):
        with make_trainer(tmp_path, checkpoint_every_steps=1) as trainer:
            trainer.step()
            raise KeyError("the cause")
    writer = writer_of(trainer)
    try:
        with pytest.raises(ValueError, match="is training in folder"):
            lock_folder(tmp_path)
    finally:
        opened.set()
        writer.join(60.0)
    trainer.close()
    assert_free(tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to.*Not a directory.*another"):
        lock_folder(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("name", "is_there"), [("lock", True), ("journal.jsonl", False), ("records.jsonl", True)]
)
def test_a_link_that_others_put_in_a_file_s_place_is_refused_and_not_followed(
    tmp_path: Path, name: str, is_there: bool
) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    if is_there:
        victim.write_text("theirs, without a newline")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(ValueError, match=f"{name} is a symbolic link to .*victim.*remove the"):
        with make_trainer(folder) as trainer:
            trainer.fit()
    assert victim.exists() is is_there
    assert not is_there or victim.read_text() == "theirs, without a newline"


def test_a_link_in_the_place_of_a_file_that_is_replaced_is_replaced_itself(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("theirs")
    places = ["launchers.json", "launchers.json.tmp", "checkpoints/latest.tmp"]
    (folder / "checkpoints").mkdir(parents=True)
    for place in places:
        (folder / place).symlink_to(victim)
    with make_trainer(folder) as trainer:
        trainer.fit()
    assert victim.read_text() == "theirs"
    assert not any((folder / place).is_symlink() for place in places)
    assert (folder / "checkpoints" / "latest").is_file()


def saved_steps(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("name", "is_there"), [("checkpoints", True), ("frozen", False), ("best", False)]
)
def test_a_link_in_the_place_of_a_folder_of_weights_is_refused(
    tmp_path: Path, name: str, is_there: bool
) -> None:
    # The other run's checkpoints were continued, pruned, or with "replace" deleted.
    other, folder = tmp_path / "other", tmp_path / "run"
    with make_trainer(other, keep_checkpoints=5) as trainer:
        trainer.fit()
    steps = saved_steps(other / "checkpoints")
    assert len(steps) == 2
    target = other / "checkpoints" if is_there else tmp_path / "gone"
    folder.mkdir()
    (folder / name).symlink_to(target)
    settings = {"load_best_model_at_end": True, "evaluate_every_epochs": 1}
    for resume in ("auto", "replace", False):
        with pytest.raises(ValueError, match=f"/{name} is a symbolic link to .*{target.name}, "):
            make_trainer(folder, resume=resume, eval_dataset=tiny_data(), **settings)
    assert saved_steps(other / "checkpoints") == steps
    assert target.exists() is is_there


def test_a_link_beside_the_weights_that_a_run_does_not_write_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(tmp_path / "elsewhere")
    with make_trainer(tmp_path) as trainer:
        trainer.fit()
    assert (tmp_path / "best").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_s_folder_may_be_a_link(tmp_path: Path) -> None:
    disk, link = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    link.symlink_to(disk)
    with make_trainer(link, epochs=1) as trainer:
        trainer.fit()
    before = saved_steps(disk / "checkpoints")
    with make_trainer(link, epochs=2, keep_checkpoints=1) as trainer:
        trainer.fit()
    (after,) = saved_steps(disk / "checkpoints")
    assert link.is_symlink()
    assert after not in before


def test_where_files_cannot_be_locked_it_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    descriptors = len(os.listdir("/dev/fd"))
    with caplog.at_level(logging.WARNING):
        lock_folder(tmp_path, patience_s=60.0).close()
    assert f"cannot be locked: [Errno {errno.ENOLCK}] No locks available" in caplog.text
    assert len(os.listdir("/dev/fd")) == descriptors

"""Prove that one run at a time trains in a folder, and that nothing of a dead one keeps it."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch import nn

from pipetransformer import Trainer
from pipetransformer.folder_lock import FolderLock
from pipetransformer.world import connect
from tests.models import tiny_data, tiny_model
from tests.pool import Pool


def make_trainer(folder: Path) -> Trainer:
    """Build a trainer that saves into a folder, and continues what is there."""
    return Trainer(tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), folder=folder,
                   checkpoint_every_epochs=1, resume="auto", progress=False)


def train_and_wait(folder: Path, pipe: Connection) -> None:
    """Build a trainer and keep it until told to close it, or killed."""
    with make_trainer(folder):
        pipe.send(os.getpid())
        pipe.poll(60.0)
    pipe.send("closed")
    pipe.poll(60.0)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_folder_in_which_another_process_trains_is_refused_until_it_ends(
        tmp_path: Path, end: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=train_and_wait, args=(tmp_path, theirs))
    child.start()
    try:
        assert ours.poll(60.0)
        pid = ours.recv()
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(ValueError, match=rf"process {pid} on .* is training in folder .*wait"):
            make_trainer(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        if end == "close":
            ours.send("close")
            assert ours.recv() == "closed"
        else:
            child.kill()
            child.join(60.0)
        make_trainer(tmp_path).close()
    finally:
        child.kill()
        child.join(60.0)


def refused_after(folder: Path) -> str:
    """Return with what error this world is refused a folder."""
    with pytest.raises(ValueError) as caught:
        FolderLock(folder, connect("cpu", timeout_s=60.0))
    return str(caught.value)


def test_every_rank_hears_that_the_folder_is_refused(two_ranks: Pool, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, connect("cpu", timeout_s=60.0))
    try:
        for message in two_ranks.run(refused_after, tmp_path):
            assert message.startswith(f"rank 0: process {os.getpid()} on ")
    finally:
        lock.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to.*Not a directory.*another"):
        make_trainer(tmp_path / "file" / "run")


def test_where_files_cannot_be_locked_it_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    descriptors = len(os.listdir("/dev/fd"))
    with caplog.at_level(logging.WARNING):
        FolderLock(tmp_path, connect("cpu", timeout_s=60.0)).close()
    assert "cannot be locked: [Errno 37] No locks available; start no second run" in caplog.text
    assert len(os.listdir("/dev/fd")) == descriptors

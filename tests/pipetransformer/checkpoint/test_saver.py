"""Prove that checkpoints are written beside training; a failed write costs only itself."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipetransformer.checkpoint import run_state
from pipetransformer.checkpoint import saver as saving
from pipetransformer.checkpoint.format import ShardRecord, Shards, write_shards
from pipetransformer.checkpoint.resume import open_latest
from pipetransformer.checkpoint.saver import Saver, Snapshot
from pipetransformer.processes.world import connect
from tests.helpers.models import tiny_trainer
from tests.helpers.pool import Pool


class Latch:
    """Hold back writes until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def write(self, folder: Path, shards: Shards) -> dict[str, ShardRecord]:
        """Write once the latch is open."""
        self.reached.set()
        assert self.opened.wait(60)
        return write_shards(folder, shards)


@contextmanager
def replaced(name: str, function: object) -> Iterator[None]:
    """Replace a function that the writers call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, name, function)
        yield


def make_saver(directory: Path, *, timeout_s: float = 60.0, keep: int = 2) -> Saver:
    """Build a saver on this world, whatever its size."""
    return Saver(directory, connect("cpu", timeout_s=60.0), keep=keep, timeout_s=timeout_s)


def state(rank: int, step: int) -> dict[str, dict[str, Tensor]]:
    """Make the shards of a rank, different at every step."""
    return {f"blocks.{rank}/weights": {"w": torch.full((300,), rank + step / 2)}}


def save(saver: Saver, rank: int, step: int) -> None:
    """Save a step's state."""
    saver.save(step, state(rank, step), scalars={"step": step}, own={"rank": rank})


def found_steps(directory: Path, num_ranks: int) -> list[int]:
    """Return the steps of the folders that are left, after comparing the newest one's content."""
    newest = open_latest(directory, group=None)
    if newest is not None:
        assert newest.scalars == {
            "step": newest.step,
            "ranks": [{"rank": rank} for rank in range(num_ranks)],
        }
        for rank in range(num_ranks):
            ((name, tensors),) = state(rank, newest.step).items()
            assert torch.equal(newest.read(name)["w"], tensors["w"])
    return sorted(int(folder.name.split("-")[1]) for folder in directory.glob("step-*"))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    latch, saver = Latch(), make_saver(tmp_path)
    tensors = state(0, 10)
    scalars = {"step": 10, "nested": [1]}
    with replaced("write_shards", latch.write):
        saver.save(10, tensors, scalars=scalars, own={"rank": 0})
        assert latch.reached.wait(60)
        # These are the steps that follow.
        tensors["blocks.0/weights"]["w"].zero_()
        scalars["nested"].append(2)
        assert not saver.is_idle and saver.take_saved() is None
        assert open_latest(tmp_path, group=None) is None
        latch.opened.set()
        saver.wait()
    checkpoint = open_latest(tmp_path, group=None)
    assert checkpoint is not None and checkpoint.scalars["nested"] == [1]
    expected = state(0, 10)["blocks.0/weights"]["w"]
    assert torch.equal(checkpoint.read("blocks.0/weights")["w"], expected)
    saved = saver.take_saved()
    assert saved is not None and saved.step == 10 and saver.take_saved() is None
    assert saved.num_bytes == sum(record.num_bytes for record in checkpoint.records.values())
    saver.close()


@pytest.mark.parametrize("last", ["save", "wait", "close"])
def test_the_next_save_and_the_end_wait_for_a_save_under_way_but_not_forever(
    tmp_path: Path, last: str
) -> None:
    latch, saver = Latch(), make_saver(tmp_path, timeout_s=0.01)
    with replaced("write_shards", latch.write):
        save(saver, 0, 10)
        message = r"rank 0 is still busy with the checkpoint of step 10 in .* after 0\.01 s"
        with pytest.raises(RuntimeError, match=message):
            if last == "save":
                save(saver, 0, 20)
            else:
                getattr(saver, last)()
        latch.opened.set()
        patient = make_saver(tmp_path)
        patient._writer = saver._writer
        patient.close()
    assert found_steps(tmp_path, 1) == [10]


def test_a_process_that_failed_does_not_hang_on_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_GRACE_S", 0.01)
    latch, saver = Latch(), make_saver(tmp_path)
    with replaced("write_shards", latch.write):
        save(saver, 0, 10)
        saver.abandon()
        assert not saver.is_idle and saver._writer is not None and saver._writer.daemon
        latch.opened.set()
        saver.wait()


def test_a_process_that_failed_lets_a_save_that_is_nearly_done_finish(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    save(saver, 0, 10)
    saver.abandon()
    assert found_steps(tmp_path, 1) == [10]


def test_memory_for_the_copy_is_got_in_the_background(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    saver.reserve(state(0, 10))
    saver.wait()
    reserved = saver._snapshot._memory.data_ptr()
    save(saver, 0, 10)
    saver.close()
    assert saver._snapshot._memory.data_ptr() == reserved
    assert found_steps(tmp_path, 1) == [10]


def held_back_on_rank_1(directory: Path) -> float:
    """Hold rank 1's files back while both ranks go on using their world's group."""
    world = connect("cpu", timeout_s=60.0)
    latch, saver = Latch(), make_saver(directory)
    total = torch.ones(1)
    with replaced("write_shards", latch.write):
        if world.rank == 0:
            latch.opened.set()
        save(saver, world.rank, 10)
        assert latch.reached.wait(60)
        for _ in range(20):
            torch.distributed.all_reduce(total, group=world.group)
        assert not (directory / "latest").exists()
        torch.distributed.barrier(group=world.group)
        latch.opened.set()
        saver.close()
    return float(total)


def test_writers_agree_in_a_group_that_training_does_not_use(
    two_ranks: Pool, tmp_path: Path
) -> None:
    assert two_ranks.run(held_back_on_rank_1, tmp_path) == [2.0**20] * 2
    assert found_steps(tmp_path, 2) == [10]


class Full:
    """Fail a write after half of it, as a full disk does."""

    def write(self, folder: Path, shards: Shards) -> dict[str, ShardRecord]:
        ((_, tensors),) = shards.items()
        path = folder / "half-0123456789abcdef.safetensors"
        path.write_bytes(tensors["w"].numpy().tobytes()[:600])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to write more into a file of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def without_memory(saver: Saver) -> Iterator[None]:
    """Let a saver find no memory for its copies, as where the host has none."""

    def refuse(num_bytes: int) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "_snapshot", Snapshot())
        patch.setattr(saver._snapshot, "_new_memory", refuse)
        saver.reserve(state(saver._world.rank, 0))
        yield


class Warnings(logging.Handler):
    """Collect the warnings of the writers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def save_four_times(directory: Path, failing_rank: int, how: str) -> tuple[list[str], int]:
    """Save at 10, 20, 30 and 40; a rank cannot write at 20 and 30."""
    world, warnings = connect("cpu", timeout_s=60.0), Warnings()
    saver = make_saver(directory)
    saving._LOG.addHandler(warnings)
    try:
        save(saver, world.rank, 10)
        saver.wait()
        for step in (20, 30):
            failing = world.rank == failing_rank
            if failing and how == "limit":
                with files_of_at_most(256):
                    save(saver, world.rank, step)
                    saver.wait()
            elif failing and how == "memory":
                with without_memory(saver):
                    save(saver, world.rank, step)
                    saver.wait()
            else:
                with replaced("write_shards", Full().write if failing else write_shards):
                    save(saver, world.rank, step)
                    saver.wait()
            torch.distributed.barrier(group=world.group)
            left = found_steps(directory, 2)
            assert left == [10], left
            torch.distributed.barrier(group=world.group)
        save(saver, world.rank, 40)
        saver.close()
    finally:
        saving._LOG.removeHandler(warnings)
    saved = saver.take_saved()
    assert saved is not None and saved.step == 40
    return warnings.texts, saved.num_bytes


@pytest.mark.parametrize(
    ("failing_rank", "how", "cause"),
    [
        (0, "full", "No space left on device"),
        (1, "limit", "File too large"),
        (1, "memory", "no 1216 bytes of host memory: DefaultCPUAllocator"),
    ],
)
def test_a_full_disk_or_memory_on_one_rank_costs_that_checkpoint_and_is_told_once(
    two_ranks: Pool, tmp_path: Path, failing_rank: int, how: str, cause: str
) -> None:
    (texts, num_bytes), (others, _) = two_ranks.run(save_four_times, tmp_path, failing_rank, how)
    assert others == [] and num_bytes > 0
    assert len(texts) == 2
    for step, text in zip((20, 30), texts, strict=True):
        assert text.startswith(f"no checkpoint of step {step}: rank {failing_rank}: ")
        assert cause in text and text.endswith("; training goes on")
    assert found_steps(tmp_path, 2) == [10, 40]


@pytest.mark.parametrize("failing", ["checkpoint_folder", "publish"])
def test_what_fails_before_or_behind_the_files_costs_that_checkpoint_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = make_saver(tmp_path)
    save(saver, 0, 10)
    saver.wait()
    with replaced(failing, full):
        save(saver, 0, 20)
        saver.wait()
    assert "no checkpoint of step 20: rank 0: [Errno 28] No space left on device" in caplog.text
    assert found_steps(tmp_path, 1) == [10]
    save(saver, 0, 30)
    saver.close()
    assert found_steps(tmp_path, 1) == [10, 30]


def test_a_directory_that_goes_away_while_it_is_written_costs_that_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, latch = tmp_path / "checkpoints", Latch()
    saver = make_saver(directory)
    with replaced("write_shards", latch.write):
        save(saver, 0, 10)
        assert latch.reached.wait(60)
        shutil.rmtree(directory)
        latch.opened.set()
        saver.wait()
    assert "no checkpoint of step 10: rank 0: " in caplog.text
    save(saver, 0, 20)
    saver.close()
    assert found_steps(directory, 1) == [20]


def test_a_value_that_a_checkpoint_cannot_hold_is_refused_at_the_step(tmp_path: Path) -> None:
    saver = make_saver(tmp_path)
    with pytest.raises(TypeError, match=r"state\['scalars'\]\['policy'\] is a Tensor"):
        saver.save(10, {}, scalars={"policy": torch.ones(1)}, own={})
    saver.close()
    assert not list(tmp_path.iterdir())


def lose_a_rank(directory: Path) -> str:
    """Save where rank 1 never comes; return what rank 0 is told at its next save."""
    world = connect("cpu", timeout_s=60.0)
    saver = make_saver(directory, timeout_s=0.5)
    message = ""
    if world.rank == 0:
        save(saver, 0, 10)
        with pytest.raises(RuntimeError, match=r"rank 0 could not save .* step 10: ") as caught:
            # The group's limit ends the writer; a longer one is for the writer itself.
            saver._timeout_s = 60.0
            save(saver, 0, 20)
        message = str(caught.value)
    torch.distributed.barrier(group=world.group)
    return message


def test_a_rank_whose_files_never_come_ends_the_run_within_the_limit(tmp_path: Path) -> None:
    pool = Pool(2)  # A world of its own, as its group is broken afterwards.
    try:
        message = pool.run(lose_a_rank, tmp_path)[0]
    finally:
        pool.close()
    assert "raise setup_timeout_s or save to a faster disk" in message
    assert open_latest(tmp_path, group=None) is None


def test_a_save_that_is_due_too_early_is_left_out_and_the_last_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_state, "_PATIENCE_STEPS", 1.0)
    latch = Latch()

    def open_later() -> None:
        assert latch.reached.wait(60)
        time.sleep(2.0)  # The steps that follow take some milliseconds each.
        latch.opened.set()

    opener = threading.Thread(target=open_later)
    opener.start()
    trainer = tiny_trainer(
        folder=tmp_path, epochs=2, global_batch_size=6, checkpoint_every_steps=3
    )
    with replaced("write_shards", latch.write), trainer:
        trainer.fit()
    opener.join()
    # Due after steps 3, 6, 9 and at the end, 10; the first was written until all else was done.
    left_out = [text for text in caplog.messages if "still being written" in text]
    assert [text.split(":")[0] for text in left_out] == [
        "no checkpoint of step 6",
        "no checkpoint of step 9",
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-00000003",
        "step-00000010",
    ]


def catch_up(rank_is_busy: tuple[bool, bool]) -> bool:
    """Ask whether all ranks have written, where some are writing."""
    saver, latch = make_saver(Path("unused")), threading.Event()
    if rank_is_busy[saver._world.rank]:
        saver._start("a save", latch.wait)
    found = saver.catches_up(patience_s=0.01)
    latch.set()
    saver.close()
    return found


@pytest.mark.parametrize("busy", [(False, False), (True, False), (False, True)])
def test_a_save_is_left_out_by_all_ranks_or_none(two_ranks: Pool, busy: tuple[bool, bool]) -> None:
    assert two_ranks.run(catch_up, busy) == [busy == (False, False)] * 2

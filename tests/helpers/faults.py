"""Strike the ranks of a launched run at chosen points, and bring home what to compare."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pipetransformer.checkpoint.format
import pipetransformer.checkpoint.saver
import pipetransformer.elastic.deployment
import pipetransformer.elastic.elasticity
from autocache.store import RowStore
from autodp.gradient_reducer import GradientReducer
from autodp.groups import GroupPool
from experiments.soak import last_checkpoint, limit, read_state, shared_files
from freeze import FreezeSchedule
from pipetransformer import Trainer, launch
from pipetransformer.elastic.deployment import Deployment
from pipetransformer.elastic.journal import Journal, Publication
from pipetransformer.feed import ComingStep, Samples
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.report.records import RECORDS_FILE, read_records
from pipetransformer.stage.stage import Stage
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.work import TrainWork
from tests.helpers.measured import measuring, never
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import suit_tests
from tests.helpers.scenario import Forced, Shape, build_adamw, slow_start

POINTS: dict[str, tuple[Any, str]] = {
    "measure": (pipetransformer.elastic.elasticity, "measure"),
    "read": (Samples, "read"),
    "step": (Stage, "train_step"),
    "forward": (TrainWork, "forward"),
    "loss": (TrainWork, "finish"),
    "reduce": (GradientReducer, "finish"),
    "update": (TrainedPart, "update"),
    "policy": (FreezeSchedule, "decide"),
    "planner": (Forced, "__call__"),
    "journal": (Journal, "append"),
    "decision": (Publication, "publish"),
    "leave": (Deployment, "_leave_stage"),
    "move": (pipetransformer.elastic.deployment, "move_shards"),
    "adopt": (Deployment, "_adopt"),
    "groups": (GroupPool, "open"),
    "cache": (FrozenPrefix, "set_depth"),
    "cache file": (RowStore, "create_nameless"),
    "cache opened": (RowStore, "open"),
    "save": (pipetransformer.checkpoint.saver.Saver, "save"),
    "write": (pipetransformer.checkpoint.saver, "write_shards"),
    "publish": (pipetransformer.checkpoint.saver, "publish"),
    "pointer": (pipetransformer.checkpoint.format, "_write_sealed"),
}
"""Where a fault can strike: functions that a rank calls, patched in that rank's process alone."""

RECOVERY_LIMIT_S = 30.0

NUM_STEPS = 15
TRANSITION = 5
"""Steps done before the first change of K, R and what is frozen."""


@dataclass(frozen=True)
class Fault:
    """Describe what happens to one rank.

    Args:
        rank: whom it strikes.
        point: a key of POINTS.
        step: how many steps are done then; None counts calls from the process's start.
        call: which call of the point's function since then, from 0.
        how: "kill" and "stop" are signals; "raise" and "exit" come from the user's code; "full"
            lets files grow no further during the call; "node" kills the launcher and its ranks.
        after: whether it strikes after the call rather than before.
        attempt: after how many restarts of the run.
    """

    rank: int
    point: str
    step: int | None = None
    call: int = 0
    how: str = "kill"
    after: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class Run:
    """Describe a run with changes of K and R, freezing, a cache, and a save every third step.

    Args:
        folder: its records and checkpoints go there.
        faults: what happens to it.
        settings: further settings of the Trainer.
        shapes: step -> the pipeline from then on.
        dtype, dropout: of the model.
    """

    folder: Path
    faults: tuple[Fault, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    shapes: dict[int, Shape] = field(
        default_factory=lambda: {0: Shape(2, 2), TRANSITION: Shape(1, 2), 12: Shape(2, 3)}
    )
    dtype: str = "float32"
    dropout: float = 0.1


class UserError(LookupError):
    """Stand for what a user's code may raise."""


class Clock:
    """Count the steps that this process has done, beginning where its run was resumed.

    When the first of them is done, is noted in a folder.
    """

    def __init__(self, folder: Path) -> None:
        self.num_steps: int | None = None
        original = Stage.train_step

        def train_step(stage: Stage, coming: ComingStep, *arguments: Any, **options: Any) -> Any:
            is_first, self.num_steps = self.num_steps is None, coming.step
            result = original(stage, coming, *arguments, **options)
            if is_first:
                note(folder / "trained", f"{time.time()}")
            self.num_steps = coming.step + 1
            return result

        Stage.train_step = train_step  # type: ignore[method-assign]


def lay(fault: Fault, clock: Clock, folder: Path) -> None:
    """Patch a fault's point in this process; it does as before but for the one call."""
    owner, name = POINTS[fault.point]
    original, calls = getattr(owner, name), itertools.count()

    def struck(*arguments: Any, **options: Any) -> Any:
        is_due = fault.step is None or clock.num_steps == fault.step
        if not is_due or next(calls) != fault.call:
            return original(*arguments, **options)
        if not fault.after:
            with suffering(fault, folder):
                return original(*arguments, **options)
        value = original(*arguments, **options)
        with suffering(fault, folder):
            return value

    setattr(owner, name, struck)


@contextmanager
def suffering(fault: Fault, folder: Path) -> Iterator[None]:
    """Let a fault happen to this process."""
    note(folder / "struck", json.dumps([time.time(), fault.rank, fault.point, fault.attempt]))
    if fault.how == "node":
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None
        os.kill(parent.pid, signal.SIGKILL)
        signal.pause()
    if fault.how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.how == "raise":
        raise UserError(f"{fault.point} went wrong on rank {fault.rank}")
    if fault.how == "exit":
        raise SystemExit(3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def train(run: Run) -> None:
    """Train in a launched process, which may not live to the end."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["PIPETRANSFORMER_RESTART_COUNT"])
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    note(pids_file(run, parent.pid), str(os.getpid()))
    keep_warnings(run.folder / "warnings", rank)
    suit_tests()
    clock = Clock(run.folder)
    with measuring(never):  # Pipelines are forced, and every attempt would measure anew.
        for fault in run.faults:
            if (fault.rank, fault.attempt) == (rank, attempt):
                lay(fault, clock, run.folder)
        with make_trainer(run) as trainer:
            trainer.fit()


def make_trainer(run: Run) -> Trainer:
    """Build what a run trains with."""
    dtype = getattr(torch, run.dtype)
    settings = {
        "epochs": 3,
        "global_batch_size": 6,
        "seed": 5,
        "max_grad_norm": 0.5,
        "learning_rate_schedule": slow_start,
        "freeze_interval_steps": 1,
        "checkpoint_every_steps": 3,
        "setup_timeout_s": 30.0,
        "progress": False,
    }
    return Trainer(
        tiny_model(dropout=run.dropout, dtype=dtype),
        tiny_data(dtype=dtype),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=build_adamw,
        freeze=FreezeSchedule((0, 2, 3)),
        plan=Forced(run.shapes),
        folder=run.folder / "run",
        **{**settings, **run.settings},
    )


def keep_warnings(path: Path, rank: int) -> None:
    """Write this process's warnings to a file."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: note(path, f"rank {rank}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("pipetransformer").addHandler(handler)


def note(path: Path, line: str) -> None:
    """Append a line in one piece."""
    with open(path, "a") as file:
        file.write(line + "\n")


def read_notes(path: Path) -> list[str]:
    """Read the lines of a file, none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


def start(
    run: Run, *, num_slots: int = 2, max_restarts: int = 0, entry: Callable[..., None] = train
) -> None:
    """Launch a run; check that it suffers every fault, recovers or ends in time after each, and
    leaves no process and no file behind."""
    temporary = run.folder / "temporary"
    for folder in (run.folder, temporary):
        folder.mkdir(exist_ok=True)
    here = partial(tempfile.TemporaryDirectory, dir=temporary)
    try:
        with (
            limit(60.0 * (max_restarts + 1)),
            mock.patch.object(tempfile, "TemporaryDirectory", here),
        ):
            launch(
                entry,
                (run,),
                num_slots=num_slots,
                max_restarts=max_restarts,
                start_method="forkserver",
            )
    finally:
        assert shared_files(read_pids(run, os.getpid())) == []
        assert not os.listdir(temporary)
        assert all(has_ended(pid) for pid in read_pids(run, os.getpid()))
        assert_recovered_in_time(run, time.time())
    struck = [json.loads(line) for line in read_notes(run.folder / "struck")]
    missed = [f for f in run.faults if [f.rank, f.point, f.attempt] not in [s[1:] for s in struck]]
    assert not missed and len(struck) == len(run.faults), missed


def assert_recovered_in_time(run: Run, end_s: float) -> None:
    """Check that after each fault a step was trained, the next fault struck, or the run ended."""
    struck = [json.loads(line) for line in read_notes(run.folder / "struck")]
    trained = [float(line) for line in read_notes(run.folder / "trained")]
    events = [*trained, *(fault_s for fault_s, *_ in struck), end_s]
    for fault_s, *fault in struck:
        next_s = min(then_s for then_s in events if then_s > fault_s)
        assert next_s - fault_s <= RECOVERY_LIMIT_S, fault


def pids_file(run: Run, launcher: int) -> Path:
    """Name the file in which the processes of a launcher note themselves."""
    return run.folder / f"pids-{launcher}"


def read_pids(run: Run, launcher: int) -> list[int]:
    """Return the processes that a launcher has started."""
    return [int(line) for line in read_notes(pids_file(run, launcher))]


def has_ended(pid: int, *, wait_s: float = 0.0) -> bool:
    """Return whether a process has ended, waiting for that if it is not one of a launcher here."""
    if sys.platform != "linux":
        return True
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], wait_s)[0])
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Ending:
    """Hold what a run has learnt: each step's loss as last trained, and what it saved at its end.

    Args:
        losses: by step.
        state: every tensor of the last checkpoint, weights and optimizer state, by shard and name.
    """

    losses: dict[int, float]
    state: dict[str, Tensor]


def ending(run: Run) -> Ending:
    """Read what a run that came to its end has learnt."""
    records = read_records(run.folder / "run" / RECORDS_FILE)
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "step"}
    assert sorted(losses) == list(range(NUM_STEPS))
    return Ending(losses, read_state(last_checkpoint(run.folder, NUM_STEPS)))


def assert_same_bits(ours: Ending, theirs: Ending) -> None:
    """Compare every step's loss, and every tensor that was saved at the end."""
    assert ours.losses == theirs.losses
    assert ours.state.keys() == theirs.state.keys() and ours.state
    for name, tensor in ours.state.items():
        assert torch.equal(tensor, theirs.state[name]), name


def assert_close(ours: Ending, theirs: Ending) -> None:
    """Compare the same in float64: |difference| <= 1e-9 + 1e-7 * max|tensor|."""
    assert ours.losses.keys() == theirs.losses.keys()
    for step, loss in ours.losses.items():
        assert abs(loss - theirs.losses[step]) <= 1e-9 + 1e-7 * abs(loss), step
    assert ours.state.keys() == theirs.state.keys() and ours.state
    for name, tensor in ours.state.items():
        allowed = 1e-9 + 1e-7 * float(theirs.state[name].abs().max())
        assert float((tensor - theirs.state[name]).abs().max()) <= allowed, name

"""Train a small model elastically, be killed while doing so, and write down what was trained.

The ids of the samples are part of the targets: what reaches the loss is what was trained, whether
it came from the dataset or from the cache.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autopipe.plan import PipelinePlan, predict
from freeze import FreezeSchedule
from pipetransformer import Loss, PlanSituation, Trainer, adamw

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 30, 8, 6
STEPS_PER_EPOCH = -(-NUM_SAMPLES // BATCH_SIZE)
FROZEN_BY_EPOCH = (0, 0, 1, 2, 2, 3)
LENGTHS = {2: ((0, 2), (6, 1), (14, 2), (19, 1)), 4: ((0, 4), (6, 2), (12, 1), (17, 2))}
"""Pipeline lengths by the step they begin with, for each number of ranks."""

ERRORS = "errors"
"""Holds what the ranks of a run printed to their standard errors."""

KILLED = "killed"
"""Holds where each kill struck."""

ATTEMPTS = "attempts"
"""Holds when each attempt of a run began."""

_PACKAGES = tuple(
    f"{os.sep}{name}{os.sep}"
    for name in ("pipetransformer", "freeze", "autopipe", "autodp", "autocache")
)


@dataclass(frozen=True)
class Kill:
    """Say when a rank is killed: after a time, or at a call of a function.

    Args:
        rank: which.
        after_s: seconds of this process's life; None where it is a function.
        function: as `Calls` names it.
        call: which call of it, from 0.
        event: "call" or "return".
    """

    rank: int
    after_s: float | None = None
    function: str = ""
    call: int = 0
    event: str = "call"


@dataclass(frozen=True)
class SoakRun:
    """Describe a run.

    Args:
        folder: takes its checkpoints, its records and its notes.
        num_ranks: a key of LENGTHS.
        kills: one for each attempt; later attempts live to the end.
        counts: whether to count the calls of every function, which takes time.
    """

    folder: str
    num_ranks: int
    kills: tuple[Kill, ...] = ()
    counts: bool = False


@dataclass(frozen=True)
class Lengths:
    """Plan pipelines of given lengths, cut evenly: nothing measured decides."""

    by_step: tuple[tuple[int, int], ...]

    def __call__(self, situation: PlanSituation) -> PipelinePlan:
        """Return the plan of a step."""
        length = [length for step, length in self.by_step if step <= situation.step][-1]
        sublayers = situation.profile.sublayers
        first = next(i for i, s in enumerate(sublayers) if s.layer >= situation.request.num_frozen)
        num = len(sublayers) - first
        return predict(
            situation.profile,
            replace(situation.request, lengths=(length,)),
            boundaries=tuple(first + num * j // length for j in range(length + 1)),
            num_micro_batches=2,
            schedule="1f1b",
        )


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform (B, width) activations."""
        return hidden + self.dropout(self.outer(torch.tanh(self.inner(hidden))))


class Ledger:
    """Note which samples each step trains, in a file of this process's rank."""

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"samples-{os.environ['RANK']}", "a", buffering=1)
        self._attempt = os.environ["PIPETRANSFORMER_RESTART_COUNT"]
        self._step: int | None = None

    def schedule(self, step: float, max_steps: int) -> float:
        """Take the coming step from the learning rate's schedule, which every rank asks."""
        self._step = round(step)
        return 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of (B, classes) against (B, 2) classes and sample ids."""
        if torch.is_grad_enabled() and self._step is not None:
            ids = " ".join(map(str, target[:, 1].tolist()))
            self._file.write(f"{self._attempt} {self._step} {ids}\n")
        return nn.functional.cross_entropy(output, target[:, 0])


class Calls:
    """Follow the calls of the packages' functions in all threads, and act at one of them."""

    def __init__(
        self, kill: Kill | None = None, strike: Callable[[str], None] | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._kill = kill
        self._strike = strike

    def follow(self) -> None:
        """Begin, in this thread and in those that it will start."""
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        """End it, in this thread and in those to come."""
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take a call or a return; the interpreter calls it."""
        code = frame.f_code
        if event not in ("call", "return") or not any(p in code.co_filename for p in _PACKAGES):
            return
        name = _name(frame)
        if event == "call":
            self.counts[name] += 1
        kill = self._kill
        if (
            kill
            and self._strike
            and (name, event) == (kill.function, kill.event)
            and self.counts[name] == kill.call + 1
        ):
            self._strike(name)


def train(run: SoakRun) -> None:
    """Train as one rank; an attempt with a kill in store may end early."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["PIPETRANSFORMER_RESTART_COUNT"])
    folder, start = Path(run.folder), time.monotonic()
    # What a killed rank's neighbours say about it is what is expected of them.
    sys.stderr = open(folder / ERRORS, "a", buffering=1)
    if rank == 0:
        with open(folder / ATTEMPTS, "a") as file:
            file.write(f"{time.time()}\n")
    kill = run.kills[attempt] if attempt < len(run.kills) else None
    calls = Calls()
    if kill is not None and kill.rank == rank:
        calls = _arm(kill, folder)
    if run.counts:
        calls.follow()
    ledger, data = Ledger(folder), make_data()
    with Trainer(
        make_model(),
        data,
        eval_dataset=data,
        loss_fn=Loss(ledger.loss, is_exact=True),  # Else it is asked again, to probe it.
        optimizer=adamw(1e-2),
        freeze=FreezeSchedule(FROZEN_BY_EPOCH),
        epochs=EPOCHS,
        global_batch_size=BATCH_SIZE,
        max_grad_norm=1.0,
        learning_rate_schedule=ledger.schedule,
        plan=Lengths(LENGTHS[run.num_ranks]),
        freeze_interval_steps=1,
        evaluate_every_epochs=2,
        folder=folder / "run",
        checkpoint_every_steps=3,
        progress=False,
    ) as trainer:
        trainer.fit()
    if run.counts:
        calls.stop()
        answer = {"seconds": time.monotonic() - start, "calls": calls.counts}
        (folder / f"calls-{rank}.json").write_text(json.dumps(answer))


def make_model() -> nn.Sequential:
    """Build the model, the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[Block(8) for _ in range(4)], nn.Linear(8, 3))


def make_data() -> TensorDataset:
    """Make the samples; targets are (2,): the class and the sample's own id."""
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    classes = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x, torch.stack([classes, torch.arange(NUM_SAMPLES)], dim=1))


def _arm(kill: Kill, folder: Path) -> Calls:
    """Make this process die as it is told to."""

    def strike(where: str) -> None:
        with open(folder / KILLED, "a") as file:
            file.write(f"{where}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    if kill.after_s is None:
        calls = Calls(kill, strike)
        calls.follow()
        return calls
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(kill.after_s, lambda: strike(_whereabouts(main)))
    timer.daemon = True
    timer.start()
    return Calls()


def _whereabouts(thread: int) -> str:
    """Name the innermost of the packages' functions that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if any(package in frame.f_code.co_filename for package in _PACKAGES):
            return _name(frame)
        frame = frame.f_back
    return "outside of the packages"


def _name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"

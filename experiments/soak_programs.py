"""Train a small model elastically, with flushes and without, and note what is trained.

The ids of the samples are part of the targets: what reaches the loss is what was trained, whether
it came from the dataset or from the cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autodp import EpochSampler, shuffled
from autopipe.plan import PipelinePlan, predict
from freeze import FreezeSchedule
from pipetransformer import Loss, PlanSituation, Trainer, adamw

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 30, 8, 6
STEPS_PER_EPOCH = -(-NUM_SAMPLES // BATCH_SIZE)
FROZEN_BY_EPOCH = (0, 0, 1, 2, 2, 3)
SEED, LEARNING_RATE = 0, 1e-2
LENGTHS = {2: ((0, 2), (6, 1), (14, 2), (19, 1)), 4: ((0, 4), (6, 2), (12, 1), (17, 2))}
"""Pipeline lengths by the step they begin with, for each number of ranks."""


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
    """Note which samples each step trains, in a file of this process's rank.

    Args:
        shuffles: whether samples come in the Trainer's own order, from which a step is then read:
            without flushes a stage is at several of them at once.
    """

    def __init__(self, folder: Path, *, shuffles: bool = False) -> None:
        self._file = open(folder / f"samples-{os.environ['RANK']}", "a", buffering=1)
        self._attempt = os.environ["PIPETRANSFORMER_RESTART_COUNT"]
        self._step: int | None = None
        order = shuffled(NUM_SAMPLES, seed=SEED)
        self._sampler = EpochSampler(NUM_SAMPLES, order) if shuffles else None

    def schedule(self, step: float, max_steps: int) -> float:
        """Take the coming step from the learning rate's schedule, which every rank asks."""
        self._step = round(step)
        return 1.0

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of (B, classes) against (B, 2) classes and sample ids."""
        if torch.is_grad_enabled() and self._step is not None:
            ids = target[:, 1].tolist()
            self._file.write(f"{self._attempt} {self._step_of(ids)} {' '.join(map(str, ids))}\n")
        return nn.functional.cross_entropy(output, target[:, 0])

    def _step_of(self, ids: list[int]) -> int:
        assert self._step is not None
        if self._sampler is None:
            return self._step
        epoch = self._step // STEPS_PER_EPOCH  # A stream lies within one.
        order = self._sampler.global_batch(epoch, 0, NUM_SAMPLES).tolist()
        steps = {order.index(sample) // BATCH_SIZE for sample in ids}
        assert len(steps) == 1, f"a micro-batch has samples of the steps {steps}"
        return epoch * STEPS_PER_EPOCH + steps.pop()


def train_by_trainer(folder: Path, num_ranks: int) -> None:
    """Train by our Trainer."""
    ledger = Ledger(folder)
    changes = {"freeze_interval_steps": 1, "max_grad_norm": 1.0}
    _fit(folder, ledger, plan=Lengths(LENGTHS[num_ranks]), **changes)


def train_a_stream(folder: Path, num_ranks: int) -> None:
    """Train by our Trainer without flushes, which clips nothing."""
    ledger = Ledger(folder, shuffles=True)
    _fit(folder, ledger, plan=Lengths(LENGTHS[num_ranks]), weight_versions="stashed")


def make_model() -> nn.Sequential:
    """Build the model, the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[Block(8) for _ in range(4)], nn.Linear(8, 3))


def make_data() -> TensorDataset:
    """Make the samples; targets are (2,): the class and the sample's own id."""
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    classes = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x, torch.stack([classes, torch.arange(NUM_SAMPLES)], dim=1))


def _fit(folder: Path, ledger: Ledger, **settings: Any) -> None:
    data = make_data()
    with Trainer(
        make_model(),
        data,
        eval_dataset=data,
        loss_fn=Loss(ledger.loss, is_exact=True),  # Else it is asked again, to probe it.
        optimizer=adamw(LEARNING_RATE),
        freeze=FreezeSchedule(FROZEN_BY_EPOCH),
        epochs=EPOCHS,
        global_batch_size=BATCH_SIZE,
        seed=SEED,
        learning_rate_schedule=ledger.schedule,
        evaluate_every_epochs=2,
        folder=folder / "run",
        checkpoint_every_steps=3,
        progress=False,
        **settings,
    ) as trainer:
        trainer.fit()

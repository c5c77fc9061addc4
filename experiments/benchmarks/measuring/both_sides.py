"""Train a task by the Trainer as the plain loop does, and verify that both learn alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from experiments.benchmarks.measuring.rounds import ResultsDifferError
from experiments.benchmarks.measuring.timed_loop import TimedLoop
from experiments.gpu_check.workloads import LoopCase
from freeze import FreezeSchedule
from pipetransformer import Trainer, adamw

MAX_GRAD_NORM = 1.0
"""As transformers' Trainer clips, where both do."""
LOSS_TOLERANCE = 1e-4
"""Between losses of both sides: far above rounding, far below what other samples change."""
_VERIFIED_STEPS = 4


def make_trainer(task: LoopCase, frozen_by_epoch: tuple[int, ...], **settings: Any) -> Trainer:
    """Return the Trainer of a task, with settings as the plain loop's, and others as given."""
    usual = {
        "epochs": len(frozen_by_epoch),
        "freeze": FreezeSchedule(frozen_by_epoch),
        "evaluate_every_epochs": 0,
        "progress": False,
    }
    return Trainer(
        task.build(),
        task.rows,
        optimizer=adamw(task.learning_rate),
        global_batch_size=task.batch_size,
        device="cpu",
        **{**usual, **settings},
    )


def verify_losses(task: LoopCase) -> float:
    """Train some steps of a task on both sides, without dropout, and compare their losses.

    Returns:
        the largest difference.
    Raises:
        ResultsDifferError: it is above LOSS_TOLERANCE.
    """
    build = task.build
    task = replace(task, build=lambda: _without_dropout(build()))
    loop = TimedLoop(task)
    expected = [loop.step() for _ in range(_VERIFIED_STEPS)]
    with make_trainer(task, (0,), epochs=_VERIFIED_STEPS, cache=False) as trainer:
        found = [trainer.step().loss for _ in range(_VERIFIED_STEPS)]
    most = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    if not most <= LOSS_TOLERANCE:
        raise ResultsDifferError(
            f"{task.name}: the first losses are {found}, in the plain loop {expected}; they may "
            f"differ by {LOSS_TOLERANCE}"
        )
    return most


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model

"""Make the rivals and ours of a task: the same weights, samples, rates and precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from experiments.benchmarks.measuring.timed_loop import RivalTask
from experiments.gpu_check.plain_loop import PlainLoop
from experiments.gpu_check.workloads import Shuffled
from freeze import FreezeSchedule
from pipetransformer import Trainer, named_optimizer
from pipetransformer.model import OptimizerFactory

_LEARNING_RATE = 5e-5


def two_thirds(task: RivalTask) -> int:
    """Return how many layers are frozen where much is."""
    return 2 * task.num_layers // 3


def plain_loop(task: RivalTask, model: nn.Module, device: str, *, keeps: bool) -> PlainLoop:
    """Return the plain loop, or the ideal one, in bfloat16, over a copy of the model."""
    return PlainLoop(
        task,
        copy.deepcopy(model),
        optimizer=_optimizer(device),
        device=device,
        autocast_to=torch.bfloat16,
        keeps=keeps,
    )


def our_trainer(
    task: RivalTask, model: nn.Module, device: str, *, frozen: tuple[int, ...], **settings: Any
) -> Trainer:
    """Return the Trainer that does the same with layers frozen by epoch; its caller begins it."""
    return Trainer(
        copy.deepcopy(model),
        task.dataset,
        optimizer=_optimizer(device),
        freeze=FreezeSchedule(frozen),
        device=device,
        **{
            "epochs": len(frozen),
            "global_batch_size": task.batch_size,
            "sample_order": Shuffled(len(task.dataset)),
            "num_workers": task.num_workers,
            "precision": "bf16",
            "evaluate_every_epochs": 0,
            "progress": False,
            **settings,
        },
    )


def take_steps(step: Callable[[], object], num_steps: int) -> None:
    """Take steps; of what they return nothing is read, so that nothing waits for it."""
    for _ in range(num_steps):
        step()


def _optimizer(device: str) -> OptimizerFactory:
    """Return the optimizer as fast as torch has it."""
    return named_optimizer("adamw", _LEARNING_RATE, fused=device == "cuda")

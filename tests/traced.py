"""Trace small pipelines for the tests of timelines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopipe.gpipe.module import GPipe
from autopipe.trace.trace import Trace

WIDTH, SAMPLES, CHUNKS = 8, 12, 4
CASES = [
    (balance, schedule, checkpoint)
    for balance in ((2, 2), (1, 1, 2), (4,))
    for schedule in ("gpipe", "1f1b")
    for checkpoint in ("always", "except_last", "never")
]


def model(balance: tuple[int, ...] = (2, 2), **options: Any) -> GPipe:
    """Wrap layers each of which saves its input, 8 values a sample, and nothing else."""
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).double() for _ in range(4)])
    return GPipe(layers, balance, chunks=CHUNKS, **options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.rand(2, SAMPLES, WIDTH, dtype=torch.float64).unbind()


def traced_step(balance: tuple[int, ...], schedule: str, checkpoint: str) -> Trace:
    pipeline = model(balance, checkpoint=checkpoint, schedule=schedule)
    with pipeline.trace() as trace:
        pipeline.step(*batch(), nn.functional.l1_loss)
    return trace


def recomputed(checkpoint: str) -> range:
    return range({"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[checkpoint])

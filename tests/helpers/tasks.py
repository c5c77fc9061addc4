"""Build tasks to measure, and note what is measured of them."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.loss import choose_loss
from pipetransformer import adamw
from pipetransformer.config import TrainConfig
from pipetransformer.feed.samples import Batch
from pipetransformer.model import OptimizerFactory, Task, adapt
from pipetransformer.processes.world import World
from tests.helpers.models import tiny_data, tiny_model

ALONE = World(0, 1, 1, torch.device("cpu"), None, owned=False)


DATA = tiny_data()


class Counter(nn.Module):
    """Count forwards in a buffer, and draw random numbers."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(8, dtype=torch.float64), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        self.mean.mul_(0.9).add_(hidden.detach().mean(0))
        return hidden + torch.rand_like(hidden)


def make_task(
    model: nn.Sequential | None = None,
    *,
    optimizer: OptimizerFactory | None = None,
    **settings: Any,
) -> Task:
    """Make a task over a model, the tiny one by default."""
    layered = adapt(model or tiny_model())
    names = frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad)
    loss_fn = choose_loss(nn.CrossEntropyLoss(), None, model="Sequential")
    return Task(layered, loss_fn, optimizer or adamw(), TrainConfig(**settings), names)


def read(ids: Tensor) -> Batch:
    x, y = DATA.tensors
    ids = ids % len(DATA)
    return {"x": x[ids], "y": y[ids]}


def disturbed_model(*, writes: bool = True) -> nn.Sequential:
    """Make a model with gradients, mixed modes, a frozen layer and, if it `writes`, a changing
    buffer."""
    between = Counter() if writes else nn.Dropout(0.5)
    model = nn.Sequential(*tiny_model(dropout=0.5)[:3], between, *tiny_model()[3:])
    model(DATA.tensors[0]).sum().backward()
    model[1].requires_grad_(False)
    model.get_parameter("2.inner.weight").grad = None
    model[2].eval()
    model.get_submodule("4.dropout").eval()
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Copy everything that a measurement might change."""
    named = dict(model.named_parameters())
    return {
        "parameters": {n: p.detach().clone() for n, p in named.items()},
        "gradients": {n: p.grad.clone() for n, p in named.items() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "random": {"torch": torch.get_rng_state()},
        "flags": {n: m.training for n, m in model.named_modules()},
        "needs": {n: p.requires_grad for n, p in named.items()},
        "objects": {n: id(p) for n, p in named.items()},
        "generators": (random.getstate(), pickle.dumps(np.random.get_state())),
    }


def assert_untouched(model: Any, before: dict[str, Any]) -> None:
    """Compare a model, and all random numbers, with what `snapshot` has found before."""
    after = snapshot(model)
    for kind in ("parameters", "gradients", "buffers", "random"):
        assert after[kind].keys() == before[kind].keys() and before[kind]
        for name, tensor in before[kind].items():
            assert torch.equal(after[kind][name], tensor), (kind, name)
    for kind in ("flags", "needs", "objects", "generators"):
        assert after[kind] == before[kind], kind

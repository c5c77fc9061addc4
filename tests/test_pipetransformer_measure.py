"""Prove that measuring leaves the model as it was, and that all ranks get the same figures."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe import Profile
from pipetransformer import adamw
from pipetransformer.adapters import adapt
from pipetransformer.config import TrainConfig
from pipetransformer.data import Batch
from pipetransformer.measure import Measurements, measure
from pipetransformer.optimizer_state import OptimizerFactory
from pipetransformer.stage import Task
from pipetransformer.world import World, connect
from tests.models import tiny_data, tiny_model
from tests.pool import Pool

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


def make_task(model: nn.Sequential | None = None, *, optimizer: OptimizerFactory | None = None,
              **settings: Any) -> Task:
    """Make a task over a model, the tiny one by default."""
    layered = adapt(model or tiny_model())
    names = frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad)
    return Task(layered, nn.CrossEntropyLoss(), optimizer or adamw(),
                TrainConfig(**settings), names)


def read(ids: Tensor) -> Batch:
    x, y = DATA.tensors
    return {"x": x[ids], "y": y[ids]}


def disturbed_model() -> nn.Sequential:
    """Make a model with gradients, mixed modes, a changing buffer and a frozen layer."""
    model = nn.Sequential(*tiny_model(dropout=0.5)[:3], Counter(), *tiny_model()[3:])
    model(DATA.tensors[0]).sum().backward()
    model[1].requires_grad_(False)
    model.get_parameter("2.inner.weight").grad = None
    model[2].eval()
    model.get_submodule("4.dropout").eval()
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Copy everything that a measurement might change."""
    named = dict(model.named_parameters())
    return {"parameters": {n: p.detach().clone() for n, p in named.items()},
            "gradients": {n: p.grad.clone() for n, p in named.items() if p.grad is not None},
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
            "random": {"torch": torch.get_rng_state()},
            "flags": {n: m.training for n, m in model.named_modules()},
            "needs": {n: p.requires_grad for n, p in named.items()},
            "objects": {n: id(p) for n, p in named.items()},
            "generators": (random.getstate(), pickle.dumps(np.random.get_state()))}


def test_measuring_leaves_model_and_random_numbers_as_they_were() -> None:
    model = disturbed_model()
    task, before = make_task(model), snapshot(model)
    measure(task, ALONE, read)
    after = snapshot(model)
    for kind in ("parameters", "gradients", "buffers", "random"):
        assert after[kind].keys() == before[kind].keys() and before[kind]
        for name, tensor in before[kind].items():
            assert torch.equal(after[kind][name], tensor), (kind, name)
    for kind in ("flags", "needs", "objects", "generators"):
        assert after[kind] == before[kind], kind


def test_measuring_leaves_no_hook_behind() -> None:
    model = tiny_model()
    measure(make_task(model), ALONE, read)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(("batch_size", "sizes"), [
    (1, (1,)), (2, (1,)), (8, (1, 4)), (32, (4, 16)), (4096, (8, 32))])
def test_sizes_to_measure_follow_the_batch(batch_size: int, sizes: tuple[int, ...]) -> None:
    asked = []

    def noting(ids: Tensor) -> Batch:
        asked.append(len(ids))
        return read(ids % len(DATA))

    profile = measure(make_task(batch_size=batch_size), ALONE, noting).profile
    assert profile.batch_sizes == sizes == tuple(asked)


def test_every_sublayer_is_measured_under_its_name_and_layer() -> None:
    task = make_task()
    measured = measure(task, ALONE, read)
    costs, sublayers = measured.profile.sublayers, task.model.sublayers
    assert [(cost.name, cost.layer) for cost in costs] == [(s.name, s.layer) for s in sublayers]
    for index, cost in enumerate(costs):
        assert cost.parameter_bytes == sum(t.nbytes for t in task.model.tensors(index).values())
        assert min(*cost.forward_s, *cost.backward_s, *cost.frozen_s) > 0
    assert [cost.output_bytes for cost in costs] == [64.0] * 5 + [24.0]
    assert measured.copy_bytes_per_s > 0


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_optimizer_state_is_measured_in_parameter_bytes() -> None:
    # AdamW holds two moments, and a step counter of 4 bytes a parameter tensor.
    assert 2.0 < measure(make_task(), ALONE, read).profile.state_bytes_ratio < 2.1
    assert measure(make_task(optimizer=sgd), ALONE, read).profile.state_bytes_ratio == 0.0


def test_a_model_with_nothing_to_train_needs_no_optimizer() -> None:
    profile = measure(make_task(tiny_model().requires_grad_(False)), ALONE, read).profile
    assert (profile.optimizer_s_per_byte, profile.state_bytes_ratio) == (0.0, 0.0)


def measure_here() -> Measurements:
    return measure(make_task(), connect("cpu", timeout_s=30.0), read)


def test_all_ranks_get_the_same_figures_with_links_measured(two_ranks: Pool) -> None:
    first, second = two_ranks.run(measure_here)
    assert first == second and isinstance(first.profile, Profile)
    for cost in (first.profile.link, first.profile.all_reduce):
        assert cost.latency_s > 0 and cost.bytes_per_s > 0

"""Prove that measuring leaves the model as it was, and that all ranks get the same figures."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe.loss import choose_loss
from autopipe.profile.profile import Profile
from freeze import FreezeSchedule
from pipetransformer import Trainer, adamw
from pipetransformer.config import TrainConfig
from pipetransformer.feed.samples import Batch
from pipetransformer.measure import measurements as measure_module
from pipetransformer.measure.measurements import Measurements, measure
from pipetransformer.model import OptimizerFactory, Task
from pipetransformer.model.registry import adapt
from pipetransformer.processes.world import World, connect
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


def read_single(ids: Tensor) -> Batch:
    """Read in single precision."""
    return {name: t.float() if t.is_floating_point() else t for name, t in read(ids).items()}


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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_bytes_are_those_of_the_precision(precision: str) -> None:
    whole, low = (
        measure(make_task(tiny_model(dtype=torch.float32), precision=one), ALONE, read_single)
        for one in (None, precision)
    )
    for before, now in zip(whole.profile.sublayers[:-1], low.profile.sublayers[:-1], strict=True):
        assert 2 * now.output_bytes == before.output_bytes
        assert now.gradient_bytes == now.parameter_bytes == before.parameter_bytes
        assert now.saved_bytes < before.saved_bytes
    # A block's two matrices.
    assert low.profile.sublayers[1].copy_bytes == 2 * (8 * 16 + 16 * 8)
    assert whole.profile.sublayers[1].copy_bytes == 0


def test_measuring_leaves_no_hook_behind() -> None:
    model = tiny_model()
    measure(make_task(model), ALONE, read)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 6)),
        (32, (2, 8, 32)),
        (4096, (256, 1024, 4096)),
    ],
)
def test_sizes_to_measure_are_quarters_of_the_batch(
    batch_size: int, sizes: tuple[int, ...]
) -> None:
    assert (
        measure(make_task(global_batch_size=batch_size), ALONE, read).profile.batch_sizes == sizes
    )


def test_sizes_beyond_the_budget_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(sublayers: object, batch: Batch) -> float:
        return float(len(batch["x"]))

    monkeypatch.setattr(measure_module, "chain_seconds", seconds)
    monkeypatch.setattr(measure_module, "_BUDGET_S", 10.5)
    profile = measure(make_task(global_batch_size=16), ALONE, read).profile
    assert profile.batch_sizes == (1, 4)  # Two rounds of 1 + 4 + 16 seconds would take 42.


def test_every_sublayer_is_measured_under_its_name_and_layer() -> None:
    task = make_task(global_batch_size=26)
    measured = measure(task, ALONE, read)
    costs, sublayers = measured.profile.sublayers, task.model.sublayers
    assert [(cost.name, cost.layer) for cost in costs] == [(s.name, s.layer) for s in sublayers]
    for index, cost in enumerate(costs):
        assert cost.parameter_bytes == sum(t.nbytes for t in task.model.tensors(index).values())
        assert min(*cost.forward_s, *cost.backward_s, *cost.frozen_s) > 0
    # The head's output is the loss, a float64 for the largest batch of 26 samples.
    assert [cost.output_bytes for cost in costs] == [64.0] * 5 + [8 / 26]
    assert measured.cache_bytes_per_s > 0 and measured.cache_write_bytes_per_s > 0
    assert measured.cache_device_bytes_per_s is None


def test_measurements_of_an_older_version_lack_the_rates_it_did_not_know() -> None:
    measured = measure(make_task(global_batch_size=2), ALONE, read)
    values = measured.to_json()
    assert Measurements.from_json(values) == measured
    for name in ("cache_write_bytes_per_s", "cache_device_bytes_per_s"):
        del values[name]
    older = dataclasses.replace(measured, cache_write_bytes_per_s=None)
    assert Measurements.from_json(values) == older


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def test_optimizer_state_is_measured_in_parameter_bytes() -> None:
    # AdamW holds two moments, and a step counter of 4 bytes a parameter tensor.
    for cost in measure(make_task(global_batch_size=8), ALONE, read).profile.sublayers:
        assert 2.0 < cost.optimizer_bytes / cost.gradient_bytes < 2.1
    for cost in measure(
        make_task(global_batch_size=8, optimizer=sgd), ALONE, read
    ).profile.sublayers:
        assert cost.gradient_bytes > 0 == cost.optimizer_bytes


def test_a_model_with_nothing_to_train_needs_no_optimizer() -> None:
    profile = measure(make_task(tiny_model().requires_grad_(False)), ALONE, read).profile
    assert profile.optimizer_s_per_byte == 0.0
    assert {cost.gradient_bytes + cost.optimizer_bytes for cost in profile.sublayers} == {0}


def measure_here() -> Measurements:
    return measure(make_task(), connect("cpu", timeout_s=30.0), read)


def test_all_ranks_get_the_same_figures_with_links_measured(two_ranks: Pool) -> None:
    first, second = two_ranks.run(measure_here)
    assert first == second and isinstance(first.profile, Profile)
    link, (total,) = first.profile.link, first.profile.all_reduce
    assert link.latency_s > 0 and link.bytes_per_s > 0
    assert total.num_replicas == 2 and min(total.seconds) > 0
    assert total.num_bytes[-1] == sum(cost.gradient_bytes for cost in first.profile.sublayers)


def measure_while_training() -> tuple[Measurements, list[str]]:
    """Measure anew in the middle of a run whose ranks each hold a half; list what that changed."""
    with Trainer(
        tiny_model(),
        DATA,
        loss_fn=nn.CrossEntropyLoss(),
        freeze=FreezeSchedule([2]),
        global_batch_size=8,
        pipeline_length=2,
        progress=False,
    ) as trainer:
        trainer.step()
        model = trainer._task.model.model
        before = {name: p for name, p in model.named_parameters() if not p.is_meta}
        values = {name: (p.detach().clone(), p.requires_grad) for name, p in before.items()}
        measured = measure(trainer._task, trainer.world, read)
        after = dict(model.named_parameters())
        changed = [
            name
            for name, p in before.items()
            if after[name] is not p
            or not torch.equal(p, values[name][0])
            or p.requires_grad != values[name][1]
        ]
        changed += [name for name, p in after.items() if name not in before and not p.is_meta]
        trainer.step()
        return measured, changed


def test_measuring_in_the_middle_of_a_run_changes_nothing_of_it(two_ranks: Pool) -> None:
    (first, changed), (second, also_changed) = two_ranks.run(measure_while_training)
    assert first == second and not changed and not also_changed
    for cost in first.profile.sublayers:
        assert min(*cost.forward_s, *cost.backward_s, *cost.frozen_s) > 0


def test_all_sizes_are_padded_as_the_micro_batches_of_one_step() -> None:
    # Padded to their own longest, few samples seemed to take less each than many: plans for
    # MiniLM's phrases were predicted at 0.6 of what their steps took.
    def read_padded(ids: Tensor) -> Batch:
        return {"x": torch.zeros(len(ids), int(ids.max()) + 1)}

    cut = measure_module._cut_alike(make_task(global_batch_size=8), ALONE, read_padded)
    assert [tuple(cut(size)["x"].shape) for size in (1, 2, 8)] == [(1, 8), (2, 8), (8, 8)]


def test_samples_to_measure_come_from_all_over_the_data_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[list[float]] = []

    def note(task: Task, world: World, read: Any, **held: int) -> Measurements:
        entry = next(iter(read(torch.arange(4)).values()))
        found.append(entry.flatten().tolist())
        return measure(task, world, read, **held)

    monkeypatch.setattr("pipetransformer.elastic.elasticity.measure", note)
    data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None], torch.zeros(40))
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Flatten(0))
    with Trainer(
        model, data, loss_fn=nn.MSELoss(), freeze=None, global_batch_size=4, progress=False
    ) as trainer:
        trainer.begin()
    assert found == [[0.0, 10.0, 20.0, 30.0]]

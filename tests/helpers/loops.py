"""Train any model twice: in the Trainer, and in a loop as a user would write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from autodp.sampler import EpochSampler, shuffled
from freeze import FreezeSchedule
from pipetransformer import LayeredModel, Trainer
from pipetransformer.model import adapt
from tests.helpers.inspection import stage_of
from tests.helpers.models import tiny_data, tiny_model

Build = Callable[[], nn.Module | LayeredModel]


@dataclass(frozen=True)
class Job:
    """Describe a run; picklable, so that worker processes can build it.

    Args:
        build: makes the model, the same weights on every call.
        data: makes the data set.
        optimizer: builds it over named parameters.
        loss_fn: takes (output, targets).
        frozen: frozen layers by epoch.
        settings: further settings of the Trainer.
    """

    build: Build
    data: Callable[[], TensorDataset]
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]
    loss_fn: Any = nn.CrossEntropyLoss()  # noqa: RUF009
    frozen: tuple[int, ...] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Return the Trainer's settings."""
        defaults = {
            "epochs": 2,
            "global_batch_size": 8,
            "progress": False,
            "evaluate_every_epochs": 0,
        }
        return {**defaults, **self.settings}


@dataclass
class Result:
    """Hold the loss of every step, rank 0's weights, and what this rank trained."""

    losses: list[float]
    weights: dict[str, Tensor]
    trained: dict[str, Tensor]


def make_trainer(job: Job, **settings: Any) -> Trainer:
    """Build the job's Trainer on this world."""
    return Trainer(
        job.build(),
        job.data(),
        loss_fn=job.loss_fn,
        optimizer=job.optimizer,
        freeze=FreezeSchedule(job.frozen),
        **{**job.options, **settings},
    )


def train(job: Job) -> Result:
    """Run the job in the Trainer, on this world."""
    with make_trainer(job) as trainer:
        losses = []
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        trained = {
            name: parameter.detach().clone()
            for name, parameter in stage_of(trainer).trained.parameters.items()
        }
        weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    return Result(losses, weights, trained)


def loop(job: Job) -> Result:
    """Run the job in a hand-written loop: one process, no micro-batches, no framework."""
    layered, data, options = adapt(job.build()), job.data(), job.options
    model, size = layered.model, options["global_batch_size"]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = job.optimizer(named)
    sampler = EpochSampler(len(data), shuffled(len(data), seed=options.get("seed", 0)))
    losses = []
    for epoch in range(options["epochs"]):
        first = layered.first_active(job.frozen[min(epoch, len(job.frozen) - 1)])
        frozen = {name for index in range(first) for name in layered.tensors(index)}
        for name, parameter in named:
            parameter.requires_grad_(name not in frozen)
        for position in range(0, len(data), size):
            x, y = data[sampler.global_batch(epoch, position, size)]
            optimizer.zero_grad(set_to_none=True)
            loss = job.loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = dict(model.state_dict())
    return Result(losses, weights, {name: p.detach() for name, p in named})


def assert_as_loop(result: Result, reference: Result) -> None:
    """Compare every loss and weight: |difference| <= 1e-9 + 1e-7 * max|tensor|, in float64."""
    torch.testing.assert_close(
        torch.tensor(result.losses), torch.tensor(reference.losses), rtol=1e-7, atol=1e-9
    )
    assert result.weights.keys() == reference.weights.keys()
    for mine, others in ((result.weights, reference.weights), (result.trained, reference.trained)):
        for name, tensor in mine.items():
            allowed = 1e-9 + 1e-7 * float(others[name].abs().max())
            assert float((tensor - others[name]).abs().max()) <= allowed, name


Named = Sequence[tuple[str, nn.Parameter]]


def fused_adamw(named: Named) -> Optimizer:
    """Build a fused AdamW, which works on memory whatever the strides."""
    return AdamW([p for _, p in named], lr=1e-3, fused=True)


def sgd(named: Named) -> Optimizer:
    """Build SGD with momentum."""
    return SGD([p for _, p in named], lr=0.1, momentum=0.9)


TINY = Job(tiny_model, tiny_data, sgd, settings={"pipeline_length": 1, "micro_batches": 2})

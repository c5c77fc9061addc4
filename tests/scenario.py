"""Train the tiny model under a forced sequence of pipelines, and bring home what to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autodp import EpochSampler, gather_json
from autopipe import PipelinePlan, predict
from freeze import FreezeSchedule
from pipetransformer import PlanSituation, Trainer
from pipetransformer.optimizer_state import NamedParameters, take_state
from pipetransformer.stage import trained_parameters
from tests.models import tiny_data, tiny_model


@dataclass(frozen=True)
class Shape:
    """Name a pipeline to force: stages, micro-batches, schedule."""

    length: int
    micro_batches: int
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Scenario:
    """Describe a run.

    Args:
        shapes: step -> the pipeline from then on; must start at 0.
        frozen: frozen layers by epoch.
        settings: further settings of the Trainer.
    """

    shapes: Mapping[int, Shape]
    frozen: tuple[int, ...] = (0,)
    dtype: str = "float64"
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Return the Trainer's settings."""
        return {
            "epochs": 3,
            "batch_size": 6,
            "seed": 5,
            "progress": False,
            "freeze_interval_steps": 1,
            "evaluate_every_epochs": 0,
            "clip_norm": 0.5,
            "learning_rate_schedule": slow_start,
            "planner": Forced(dict(self.shapes)),
            **self.settings,
        }


@dataclass(frozen=True)
class Forced:
    """Plan what the scenario says, cutting the active layers as evenly as they can be counted."""

    shapes: dict[int, Shape]

    def __call__(self, situation: PlanSituation) -> PipelinePlan:
        shape = self.shapes[max(step for step in self.shapes if step <= situation.step)]
        sublayers = situation.profile.sublayers
        first = next(i for i, s in enumerate(sublayers) if s.layer >= situation.request.num_frozen)
        length = min(shape.length, len(sublayers) - first)
        cuts = tuple(first + (len(sublayers) - first) * j // length for j in range(length + 1))
        request = dataclasses.replace(
            situation.request,
            lengths=(length,),
            micro_batches=(shape.micro_batches,),
            schedules=(shape.schedule,),
        )
        return predict(
            situation.profile,
            request,
            boundaries=cuts,
            num_micro_batches=shape.micro_batches,
            schedule=shape.schedule,
        )


def slow_start(step: float, max_steps: int) -> float:
    """Warm up for two steps: AdamW divides by tiny second moments at first, and would amplify
    rounding."""
    return min(1.0, (step + 1) / 3)


def build_adamw(named: NamedParameters) -> Optimizer:
    """Build AdamW with a decayed and an undecayed group."""
    return AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


@dataclass
class Outcome:
    """Hold the loss of every step, and final weights and optimizer state by name."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def train(scenario: Scenario, num_steps: int | None = None) -> Outcome:
    """Run the scenario on this world; the outcome is rank 0's, states are of all ranks."""
    dtype = getattr(torch, scenario.dtype)
    trainer = Trainer(
        tiny_model(dropout=scenario.dropout, dtype=dtype),
        tiny_data(dtype=dtype),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=build_adamw,
        freeze=FreezeSchedule(scenario.frozen),
        **scenario.options,
    )
    with trainer:
        return run_to_end(trainer, num_steps)


def run_to_end(trainer: Trainer, num_steps: int | None) -> Outcome:
    """Take all steps that are left (or so many), and collect."""
    losses = []
    while not trainer._timeline.is_over and len(losses) != num_steps:
        losses.append(trainer.step().loss)
    return collect(trainer, losses)


def collect(trainer: Trainer, losses: list[float]) -> Outcome:
    """Gather a trainer's weights and the optimizer state of every rank."""
    deployment = trainer._deployment
    states: dict[str, Tensor] = {}
    for shard in deployment._parked.values():
        states.update({key: t.clone() for key, t in shard.items()})
    stage = deployment.active_stage
    for index in stage._trained:
        parameters = trained_parameters(trainer._task, range(index, index + 1))
        states.update({k: t.clone() for k, t in take_state(stage.optimizer, parameters).items()})
    weights = {name: t.clone() for name, t in trainer.state_dict().items()}
    report = trainer.report
    extra = {
        "hits": report.cache_hits,
        "transitions": report.transitions,
        "rank": trainer.world.rank,
        "replica_digests": digests(trainer),
    }
    return Outcome(losses, weights, states, extra)


def digests(trainer: Trainer) -> list[dict[str, str]]:
    """Return every rank's trained parameters as hexadecimal sums of their bytes, to compare
    replicas bitwise."""
    own = {
        name: p.detach().numpy().tobytes().hex()
        for name, p in trainer._deployment.active_stage.parameters.items()
    }
    return gather_json(own, group=trainer.world.group)


def plain(scenario: Scenario) -> Outcome:
    """Train the same in a hand-written loop: one process, no micro-batches, no framework."""
    dtype = getattr(torch, scenario.dtype)
    model, data, options = tiny_model(dtype=dtype), tiny_data(dtype=dtype), scenario.options
    optimizer = build_adamw(list(model.named_parameters()))
    sampler = EpochSampler(len(data), seed=options["seed"])
    per_epoch = -(-len(data) // options["batch_size"])
    losses = []
    for step in range(per_epoch * options["epochs"]):
        epoch, position = divmod(step, per_epoch)
        frozen = scenario.frozen[min(epoch, len(scenario.frozen) - 1)]
        for index, layer in enumerate(model):
            layer.requires_grad_(index >= frozen)
        x, y = data[
            sampler.global_batch(epoch, position * options["batch_size"], options["batch_size"])
        ]
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * slow_start(step, 0)
        optimizer.step()
        losses.append(loss.item())
    states = take_state(optimizer, dict(model.named_parameters()))
    return Outcome(losses, dict(model.state_dict()), states)


def merge(outcomes: list[Outcome]) -> Outcome:
    """Put the ranks' states together: rank 0's losses and weights, everybody's optimizer state."""
    states = {key: t for outcome in reversed(outcomes) for key, t in outcome.states.items()}
    return Outcome(outcomes[0].losses, outcomes[0].weights, states, outcomes[0].extra)


def assert_equal(
    ours: Outcome, theirs: Outcome, *, absolute: float = 1e-9, relative: float = 1e-7
) -> None:
    """Compare every loss, parameter and optimizer entry: |difference| <= absolute + relative *
    max|tensor|."""
    assert len(ours.losses) == len(theirs.losses) > 0
    assert ours.losses == pytest.approx(theirs.losses, abs=absolute, rel=relative)
    for mine, other in ((ours.weights, theirs.weights), (ours.states, theirs.states)):
        assert mine.keys() == other.keys() and mine
        for name, tensor in mine.items():
            allowed = absolute + relative * float(other[name].abs().max())
            difference = float((tensor - other[name]).abs().max())
            assert difference <= allowed, f"{name}: {difference:g} > {allowed:g}"


def assert_same_bits(ours: Outcome, theirs: Outcome) -> None:
    """Compare every loss, parameter and optimizer entry bit by bit."""
    assert ours.losses == theirs.losses
    for mine, other in ((ours.weights, theirs.weights), (ours.states, theirs.states)):
        assert mine.keys() == other.keys() and mine
        for name, tensor in mine.items():
            assert torch.equal(tensor, other[name]), name

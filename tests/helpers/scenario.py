"""Train the tiny model under a forced sequence of pipelines, and bring home what to compare."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from autodp.messages import gather_json
from autodp.sampler import EpochOrder, places_in_batches, shuffled, shuffled_in_place
from autopipe.loss import LossFunction
from autopipe.plan.request import PipelinePlan, fitting_lengths
from autopipe.plan.search import predict
from freeze import FreezeSchedule
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy
from pipetransformer import LayeredModel, PlanSituation, Trainer
from pipetransformer.model import NamedParameters, adapt, take_state, trained_parameters
from tests.helpers.inspection import deployment_of, stage_of, task_of
from tests.helpers.measured import measuring, never
from tests.helpers.models import (
    IGNORED,
    NUM_SAMPLES,
    Entries,
    deep_data,
    deep_model,
    tiny_data,
    tiny_model,
)

PEAK_LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Shape:
    """Name a pipeline to force.

    Args:
        length, micro_batches, schedule: K, M, and in which order they run.
        cuts: the sublayers with which stages 1, 2, ... begin; () cuts evenly.
        spares: whether the length may leave ranks idle; else the longest that does not is taken.
        recomputes: whether forwards run again in the backward.
    """

    length: int
    micro_batches: int
    schedule: str = "1f1b"
    cuts: tuple[int, ...] = ()
    spares: bool = False
    recomputes: bool = False


@dataclass(frozen=True)
class Deep:
    """Ask for the deep model and its data.

    Args:
        fixed: sublayers that the user does not train.
        ignored: whether the loss is a (sum, count) that leaves some targets out.
        num_samples: of the data.
    """

    fixed: tuple[str, ...] = ()
    ignored: bool = False
    num_samples: int = NUM_SAMPLES


@dataclass(frozen=True)
class Scenario:
    """Describe a run.

    Args:
        shapes: step -> the pipeline from then on; must start at 0.
        frozen: frozen layers by epoch; or step -> frozen layers from then on, starting at 0.
        settings: further settings of the Trainer.
        deep: what to train; None is the tiny model.
        slots_per_node: ranks of an emulated node; None puts all on one.
        looks: steps after which the model is evaluated, gathered and measured.
    """

    shapes: Mapping[int, Shape]
    frozen: tuple[int, ...] | Mapping[int, int] = (0,)
    dtype: str = "float64"
    dropout: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    deep: Deep | None = None
    slots_per_node: int | None = None
    looks: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Return the Trainer's settings."""
        return {
            "epochs": 3,
            "global_batch_size": 6,
            "seed": 5,
            "progress": False,
            "freeze_interval_steps": 1,
            "evaluate_every_epochs": 0,
            "max_grad_norm": 0.5,
            "learning_rate_schedule": slow_start,
            "plan": Forced(dict(self.shapes)),
            **self.settings,
        }

    def num_frozen(self, step: int, epoch: int) -> int:
        """Return the frozen layers of a step."""
        if isinstance(self.frozen, tuple):
            return self.frozen[min(epoch, len(self.frozen) - 1)]
        return latest(self.frozen, step)

    def order(self, num_samples: int) -> EpochOrder:
        """Return the order of samples, on one node or on several."""
        options = self.options
        if self.slots_per_node is None or options.get("sample_order"):
            return options.get("sample_order") or shuffled(num_samples, seed=options["seed"])
        size, unit = options["global_batch_size"], options.get("micro_batch_size") or 1
        places = places_in_batches(num_samples, size, unit=unit)
        return shuffled_in_place(places, seed=options["seed"])

    def policy(self) -> FreezePolicy:
        """Build what makes the Trainer freeze so."""
        if isinstance(self.frozen, tuple):
            return FreezeSchedule(self.frozen)
        return FreezeTable(dict(self.frozen))

    def problem(self) -> tuple[LayeredModel, TensorDataset | Entries, LossFunction]:
        """Build the model, its data and its loss."""
        dtype, deep = getattr(torch, self.dtype), self.deep
        if deep is None:
            model = adapt(tiny_model(dropout=self.dropout, dtype=dtype))
            return model, tiny_data(dtype=dtype), nn.CrossEntropyLoss()
        data = deep_data(num_samples=deep.num_samples, ignored=deep.ignored)
        loss_fn = cross_entropy_sum if deep.ignored else nn.CrossEntropyLoss()
        return deep_model(dropout=self.dropout, fixed=deep.fixed), data, loss_fn


def latest(by_step: Mapping[int, Any], step: int) -> Any:
    """Return the entry that holds at a step."""
    return by_step[max(first for first in by_step if first <= step)]


def cross_entropy_sum(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the targets that count, and how many these are."""
    total = nn.functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


@final
class FreezeTable(FreezePolicy):
    """Freeze by a table of steps, and remember what was shown at each decision."""

    signals = frozenset({"gradient_norm"})

    def __init__(self, frozen: dict[int, int]) -> None:
        self._frozen = frozen
        self.contexts: list[dict[str, Any]] = []

    def decide(self, context: FreezeContext) -> FreezeDecision:
        """Return the number of the last entry up to this step."""
        self.contexts.append(
            {
                "learning_rate": context.learning_rate,
                "norms": [layer.gradient_norm for layer in context.layers],
            }
        )
        return FreezeDecision(latest(self._frozen, context.step), "table")


@dataclass(frozen=True)
class Forced:
    """Plan what the scenario says."""

    shapes: dict[int, Shape]

    def __call__(self, situation: PlanSituation) -> PipelinePlan:
        shape = latest(self.shapes, situation.step)
        sublayers = situation.profile.sublayers
        first = next(i for i, s in enumerate(sublayers) if s.layer >= situation.request.num_frozen)
        request = situation.request
        allowed = [*fitting_lengths(request.num_ranks, request.slots_per_node)]
        if request.stage_workers is not None:
            allowed.append(len(request.stage_workers))
        most = min(shape.length, len(sublayers) - first)
        length = most if shape.spares else max(one for one in allowed if one <= most)
        even = (first + (len(sublayers) - first) * j // length for j in range(length + 1))
        cuts = (first, *shape.cuts, len(sublayers)) if shape.cuts else tuple(even)
        request = dataclasses.replace(
            request,
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
            recomputes=shape.recomputes,
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
            {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
        ],
        lr=PEAK_LEARNING_RATE,
    )


@dataclass
class Outcome:
    """Hold the loss of every step, and final weights and optimizer state by name."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


@contextmanager
def nodes_of(slots: int | None) -> Iterator[None]:
    """Let this process stand, for the Trainers built inside, on a node of so many slots."""
    before = dict(os.environ)
    if slots is not None:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % slots)
        os.environ["LOCAL_WORLD_SIZE"] = str(slots)
    try:
        yield
    finally:
        os.environ.update(before)


def make_trainer(scenario: Scenario, policy: FreezePolicy, **settings: Any) -> Trainer:
    """Build the scenario's Trainer on this world."""
    model, data, loss_fn = scenario.problem()
    with nodes_of(scenario.slots_per_node):
        return Trainer(
            model,
            data,
            loss_fn=loss_fn,
            freeze=policy,
            **{"optimizer": build_adamw, **scenario.options, **settings},
        )


@measuring(never)
def train(scenario: Scenario, num_steps: int | None = None) -> Outcome:
    """Run the scenario on this world; the outcome is rank 0's, states are of all ranks."""
    with make_trainer(scenario, scenario.policy()) as trainer:
        return run_to_end(trainer, num_steps)


def train_in_two(
    scenario: Scenario,
    folder: Path | str,
    *,
    stop: int,
    policy: Callable[[], FreezePolicy],
    **settings: Any,
) -> Outcome:
    """Stop after so many steps, each of which is saved, and resume; losses are of both parts."""
    saving = {"checkpoint_every_steps": 1, "resume": "auto", "folder": folder, **settings}
    with make_trainer(scenario, policy(), **saving) as trainer:
        begun = [trainer.step().loss for _ in range(stop)]
    with make_trainer(scenario, policy(), **saving) as trainer:
        outcome = run_to_end(trainer, None)
    return dataclasses.replace(outcome, losses=begun + outcome.losses)


def run_to_end(trainer: Trainer, num_steps: int | None) -> Outcome:
    """Take all steps that are left (or so many), and collect."""
    losses = []
    while not trainer.is_over and len(losses) != num_steps:
        losses.append(trainer.step().loss)
    return collect(trainer, losses)


def collect(trainer: Trainer, losses: list[float]) -> Outcome:
    """Gather a trainer's weights and the optimizer state of every rank."""
    deployment = deployment_of(trainer)
    states: dict[str, Tensor] = {}
    for shard in deployment._held.states.values():
        states.update({key: t.clone() for key, t in shard.items()})
    stage = deployment.active_stage
    part = stage.trained
    for index in part.indices:
        parameters = trained_parameters(task_of(trainer), (index,))
        states.update({k: t.clone() for k, t in take_state(part.optimizer, parameters).items()})
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
        name: p.detach().cpu().numpy().tobytes().hex()
        for name, p in stage_of(trainer).trained.parameters.items()
    }
    return gather_json(own, group=trainer.world.group)


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

"""Train odd models while weights, samples and labels are changed between steps; by hand, too.

step ─► events of the step: evaluate, swap averages in and out, edit, relabel, change a sample
  │
  └─ after one of them, the run may end and be resumed: another batch size, another pipeline
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autodp.sampler import EpochSampler, shuffled
from pipetransformer import Trainer
from pipetransformer.model import take_state
from tests.helpers.measured import measuring, never
from tests.helpers.models import IGNORED
from tests.helpers.odd import (
    SEED,
    Case,
    Pipeline,
    Refusal,
    build_data,
    build_model,
    changed_parameters,
    freeze,
    judged,
    layer_model,
    layers_of,
    mean,
    settings_of,
    tensors_of,
    update,
)
from tests.helpers.scenario import Outcome, collect, latest

EPOCHS = 3
WAYS = ("in place", "through data", "other data", "loaded")
"""How values are written: in place, in place through `.data`, as new `.data`, by a state dict."""


@dataclass(frozen=True)
class Event:
    """Describe what happens behind a step.

    Args:
        kind: "evaluate", or "revisit" the training data as another data set; "average", which
            evaluates other weights; "edit" of a tensor, "relabel" or "resample" of the data.
        way: how weights are written, see `WAYS`.
        number: which tensor, and which samples.
        whole: whether a row of a tensor is edited, and not one value.
    """

    kind: str
    way: str = "in place"
    number: int = 0
    whole: bool = False


@dataclass(frozen=True, repr=False)
class EditedCase:
    """Describe a run in which things change.

    Args:
        case: the model, and how it is trained.
        events: by the number of steps that are done.
        order: "shuffled" or "sequential".
        data: what holds the samples: "tensors", a "list", "targets" as an attribute, or "opaque".
        check, cache_dtype, cache_limit_bytes: settings of the Trainer.
        resume: after so many steps, in batches of such a size, in such a pipeline; None never.
    """

    case: Case
    events: dict[int, tuple[Event, ...]]
    order: str = "shuffled"
    data: str = "tensors"
    check: str = "sampled"
    cache_dtype: str | None = None
    cache_limit_bytes: int | None = None
    resume: tuple[int, int, Pipeline] | None = None

    def __repr__(self) -> str:
        told = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))
        return f"EditedCase({told})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    def batch_size(self, step: int) -> int:
        """Return the samples of the step that follows so many."""
        if self.resume is not None and step >= self.resume[0]:
            return self.resume[1]
        return self.case.batch_size

    def steps(self) -> Iterator[tuple[int, Tensor, float, bool]]:
        """Yield of every step how many came before, its samples, where it is in the run in steps
        of its size, and whether an epoch begins.
        """
        num, step = self.case.num_samples, 0
        order = shuffled(num, seed=SEED) if self.order == "shuffled" else in_order(num)
        sampler = EpochSampler(num, order)
        for epoch in range(EPOCHS):
            sample = 0
            while sample < num:
                size = self.batch_size(step)
                ids = sampler.global_batch(epoch, sample, size)
                yield step, ids, epoch * math.ceil(num / size) + sample / size, sample == 0
                step, sample = step + 1, sample + len(ids)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets; of some that are left out, those of every batch are not."""
        inputs, targets = build_data(self.case).tensors
        if targets.ndim == 1 and bool((targets == IGNORED).any()):
            for _, ids, *_ in self.steps():
                targets[ids[0]] = targets[ids[0]].clamp(min=0)
        return inputs, targets


def in_order(num: int) -> Any:
    """Return the order that is the same in every epoch."""
    return lambda epoch: torch.arange(num)


class Held:
    """Make samples of tensors, of which only the targets may be looked at from outside."""

    def __init__(self, inputs: Tensor, targets: Tensor, *, shown: bool) -> None:
        self._inputs, self._hidden = inputs, targets
        if shown:
            self.targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._hidden[index]


def dataset_of(kind: str, inputs: Tensor, targets: Tensor) -> Any:
    """Return a data set that is a view of two tensors."""
    if kind == "tensors":
        return TensorDataset(inputs, targets)
    if kind == "list":
        return [*zip(inputs, targets, strict=True)]
    return Held(inputs, targets, shown=kind == "targets")


class World:
    """Hold a model and its data, and change them as events say; ours and by hand alike."""

    def __init__(self, edited: EditedCase) -> None:
        self.edited, self.case = edited, edited.case
        self.data, self.seen = edited.tensors(), edited.tensors()
        # What is changed for good is also in a state dict, and so in a checkpoint.
        self.first = {n: t.clone() for n, t in build_model(self.case).state_dict().items()}

    def change(self, event: Event, model: nn.Module) -> None:
        """Do what an event says, but for evaluations."""
        if event.kind == "edit":
            edit(model, [*self.first][event.number % len(self.first)], event)
            return
        for inputs, targets in (self.data, self.seen):
            chosen = torch.arange(event.number % 3, len(inputs), 3)
            if event.kind == "resample":
                inputs[chosen] = inputs[chosen.roll(1)]
            elif targets.ndim == 1:
                kept = targets[chosen] != IGNORED
                targets[chosen[kept]] = (targets[chosen[kept]] + 1) % 3
            else:
                targets[chosen] = targets[chosen].roll(1, dims=1)

    def averaged(self, model: nn.Module, way: str) -> dict[str, Tensor]:
        """Put means with the first weights in place of the parameters; return what was there."""
        own = {
            name: p.detach().clone()
            for name, p in model.named_parameters()
            if not p.is_meta and name in self.first
        }
        put(model, {name: 0.5 * (own[name] + self.first[name]) for name in own}, way)
        return own


def named(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, those that are tied by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def put(model: nn.Module, values: dict[str, Tensor], way: str) -> None:
    """Write values into a model's tensors."""
    if way == "loaded":
        model.load_state_dict(values, strict=False)
        return
    for name, value in values.items():
        tensor = named(model)[name]
        if way == "in place":
            with torch.no_grad():
                tensor.copy_(value)
        elif way == "through data":
            tensor.data.copy_(value)
        else:
            tensor.data = value.clone()


def edit(model: nn.Module, name: str, event: Event) -> None:
    """Add to one row of a tensor, or to one value, where this process holds it."""
    tensor = named(model)[name]
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    place = tuple(event.number % size for size in tensor.shape)
    place = place[:1] if event.whole else place
    if event.way == "through data":
        tensor.data[place] += 0.25
        return
    value = tensor.detach().clone()
    value[place] += 0.25
    put(model, {name: value}, event.way)


def train_edited(edited: EditedCase, folder: str) -> Outcome | Refusal:
    """Train on this world, in one part, or in two with checkpoints in a folder."""
    world, losses, evaluations = World(edited), list[float](), list[dict[str, float]]()
    stop = None if edited.resume is None else edited.resume[0]
    model = build_model(edited.case)
    try:
        with measuring(never):
            if stop is not None:
                with make_trainer(world, model, folder, resumes=False) as trainer:
                    trainer.begin()
                    while len(losses) < stop:
                        happen(world, len(losses), model, trainer, evaluations)
                        losses.append(trainer.step().loss)
                model = build_model(edited.case)
            with make_trainer(world, model, folder, resumes=stop is not None) as trainer:
                trainer.begin()
                while True:
                    happen(world, len(losses), model, trainer, evaluations)
                    if trainer.is_over:
                        break
                    losses.append(trainer.step().loss)
                outcome = collect(trainer, losses)
    except (ValueError, TypeError) as error:
        if losses:
            raise
        return Refusal(str(error), changed_parameters(edited.case, model))
    outcome.weights = tensors_of(model) if outcome.weights else {}
    outcome.extra.update(evaluations=evaluations, digests=[])
    return outcome


def happen(
    world: World,
    step: int,
    model: nn.Module,
    trainer: Trainer,
    evaluations: list[dict[str, float]],
) -> None:
    """Let happen in ours what follows so many steps."""
    for event in world.edited.events.get(step, ()):
        if event.kind == "evaluate":
            evaluations.append(trainer.evaluate())
        elif event.kind == "revisit":
            data = dataset_of(world.edited.data, *world.data)
            evaluations.append(trainer.evaluate(data))
        elif event.kind == "average":
            own = world.averaged(model, event.way)
            evaluations.append(trainer.evaluate())
            put(model, own, event.way)
        else:
            world.change(event, model)


def make_trainer(world: World, model: nn.Sequential, folder: str, *, resumes: bool) -> Trainer:
    """Build the Trainer of a part of the run on this world."""
    edited, case = world.edited, world.case
    pipelines, size = case.pipelines, case.batch_size
    if resumes:
        assert edited.resume is not None
        _, size, pipeline = edited.resume
        pipelines = {0: pipeline}
    settings = {
        **settings_of(case, pipelines),
        "global_batch_size": size,
        "cache_check": edited.check,
        "cache_dtype": edited.cache_dtype,
        "cache_limit_bytes": edited.cache_limit_bytes,
        "sample_order": None if edited.order == "shuffled" else in_order(case.num_samples),
        "tensorboard": False,
    }
    if edited.resume is not None:
        settings.update(folder=folder, checkpoint_every_steps=1, resume=resumes)
    return Trainer(
        layer_model(case, model),
        dataset_of(edited.data, *world.data),
        eval_dataset=dataset_of(edited.data, *world.seen),
        epochs=EPOCHS,
        **settings,
    )


def edited_by_hand(edited: EditedCase) -> Outcome:
    """Train in a loop: one process, no micro-batches, no framework; see `odd.by_hand`.

    With a cache's dtype, what a frozen layer hands to one that is trained is rounded.
    """
    case, world = edited.case, World(edited)
    model, loss_fn = build_model(case), case.objective.build()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = case.descent.factory()(trained)
    rates = [group["lr"] for group in optimizer.param_groups]
    initial = {key: t.clone() for key, t in take_state(optimizer, dict(trained)).items()}
    losses, evaluations = list[float](), list[dict[str, float]]()
    for step, ids, at, _ in edited.steps():
        num_frozen = latest(case.frozen, step)
        if step == 0 or (edited.resume is not None and step == edited.resume[0]):
            look(world, step, model, num_frozen, evaluations)
        freeze(case, model, {p for _, p in trained}, num_frozen)
        optimizer.zero_grad(set_to_none=True)
        inputs, targets = (tensor[ids] for tensor in world.data)
        loss = mean(loss_fn, forward(edited, model, inputs, num_frozen), targets)
        loss.backward()
        update(case, optimizer, trained, rates, at)
        losses.append(loss.item())
        if edited.resume is None or step + 1 != edited.resume[0]:
            look(world, step + 1, model, num_frozen, evaluations)
    extra = {"evaluations": evaluations, "initial": initial}
    return Outcome(losses, tensors_of(model), take_state(optimizer, dict(trained)), extra)


def look(
    world: World,
    step: int,
    model: nn.Sequential,
    num_frozen: int,
    evaluations: list[dict[str, float]],
) -> None:
    """Let happen by hand what follows so many steps."""
    for event in world.edited.events.get(step, ()):
        if event.kind in ("evaluate", "revisit"):
            data = world.seen if event.kind == "evaluate" else world.data
            evaluations.append(evaluated(world, model, data, num_frozen))
        elif event.kind == "average":
            own = world.averaged(model, event.way)
            evaluations.append(evaluated(world, model, world.seen, num_frozen))
            put(model, own, event.way)
        else:
            world.change(event, model)


def forward(edited: EditedCase, model: nn.Sequential, hidden: Tensor, num_frozen: int) -> Tensor:
    """Run the model."""
    rounds = edited.case.cache and edited.cache_dtype is not None
    layers = layers_of(edited.case)
    # A frozen layer that is tied to the head goes on training, so that nothing is cached.
    tied = [i for i, kind in zip(layers, edited.case.kinds, strict=False) if kind == "tied_across"]
    rounds = rounds and not any(layer < num_frozen for layer in tied)
    for index, module in enumerate(model):
        is_cut = index > 0 and layers[index - 1] < num_frozen <= layers[index]
        if rounds and is_cut and hidden.is_floating_point():
            hidden = hidden.to(getattr(torch, edited.cache_dtype or "")).to(hidden.dtype)
        hidden = module(hidden)
    return hidden


@torch.no_grad()
def evaluated(
    world: World, model: nn.Sequential, data: tuple[Tensor, Tensor], num_frozen: int
) -> dict[str, float]:
    """Return what an evaluation finds."""
    inputs, targets = data
    return judged(world.case, forward(world.edited, model.eval(), inputs, num_frozen), targets)

"""Draw odd models, train them elastically and by hand, and say whether both came to the same.

A case may be refused only for what it has from the tables named ODD_*, by a message that names it.
Everything else must be as in the loop by hand.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from autodp.sampler import EpochSampler, shuffled
from autopipe.loss import LossFunction
from pipetransformer import LayeredModel, Sublayer, Trainer
from pipetransformer.measure.measurements import measure
from pipetransformer.model import take_state
from tests.helpers.forced import digests_of_this_rank
from tests.helpers.measured import measuring, never
from tests.helpers.models import IGNORED
from tests.helpers.odd_kinds import FIRST, MIDDLE, ODD_FIRST, ODD_MIDDLE
from tests.helpers.odd_layers import LENGTH, NUM_TOKENS, Head
from tests.helpers.odd_training import (
    LOSSES,
    ODD_LOSSES,
    ODD_OPTIMIZERS,
    OPTIMIZERS,
    Descent,
    Loss,
    targets_of,
)
from tests.helpers.scenario import Forced, FreezeTable, Outcome, Shape, collect, latest, slow_start

EPOCHS = 2
SEED = 5

Pipeline = tuple[int, int, str, tuple[int, ...]]


@dataclass(frozen=True, repr=False)
class Case:
    """Describe a model, and how it is trained; it goes to other processes, and builds there.

    Args:
        layers: the kinds of sublayers, layer by layer; a head comes after them.
        optimizer, loss: by name.
        num_ranks: processes.
        pipelines: step -> the pipeline from then on: (K, M, schedule, where stages begin).
        frozen: step -> frozen layers from then on.
        batch_size, num_samples: of a step, and of an epoch.
        max_grad_norm, cache, prefix_chunk: settings of the Trainer.
        look: the step after which the model is evaluated and gathered.
        measured: whether the model is really measured, and run for it, or said to have been.
    """

    layers: tuple[tuple[str, ...], ...]
    optimizer: str = "sgd"
    loss: str = "ce"
    num_ranks: int = 2
    pipelines: Mapping[int, Pipeline] = field(default_factory=lambda: {0: (1, 1, "gpipe", ())})
    frozen: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    batch_size: int = 6
    num_samples: int = 20
    max_grad_norm: float | None = None
    cache: bool = True
    prefix_chunk: int = 8
    look: int | None = None
    measured: bool = False

    def __repr__(self) -> str:
        """Name what is not as ever."""
        given = [(one.name, getattr(self, one.name)) for one in fields(self)]
        usual = Case(())
        told = [f"{name}={value!r}" for name, value in given if value != getattr(usual, name)]
        return f"Case({', '.join(told)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Have hypothesis print it so, too."""
        printer.text(repr(self))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of all sublayers but the head."""
        return tuple(kind for layer in self.layers for kind in layer)

    @property
    def descent(self) -> Descent:
        """Return the optimizer."""
        return {**OPTIMIZERS, **ODD_OPTIMIZERS}[self.optimizer]

    @property
    def objective(self) -> Loss:
        """Return the loss."""
        return {**LOSSES, **ODD_LOSSES}[self.loss]

    @property
    def must_be_refused(self) -> bool:
        """Return whether there is no number to compare with."""
        return self.descent.must or self.objective.must

    def words(self) -> tuple[str, ...]:
        """Return what a refusal may name; none where the case is to be trained."""
        words = [
            f"{i}_{kind}"
            for i, kind in enumerate(self.kinds)
            if kind in ODD_FIRST or kind in ODD_MIDDLE
        ]
        if self.descent.may_refuse:
            words += [self.descent.kind.__name__, "optimizer"]
        return (*words, *self.objective.words)

    def batches(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the ids of every step."""
        sampler, size = (
            EpochSampler(self.num_samples, shuffled(self.num_samples, seed=SEED)),
            self.batch_size,
        )
        per_epoch = math.ceil(self.num_samples / size)
        for step in range(EPOCHS * per_epoch):
            epoch, position = divmod(step, per_epoch)
            yield step, sampler.global_batch(epoch, position * size, size)


def build_model(case: Case) -> nn.Sequential:
    """Build the model, the same weights on every call.

    Sublayers are called after their position and kind, so that errors name them.
    """
    with torch.random.fork_rng(), doubles():
        torch.manual_seed(0)
        makers = {**FIRST, **ODD_FIRST, **MIDDLE, **ODD_MIDDLE}
        modules = [makers[kind]() for kind in case.kinds]
        head = Head()
    for kind, module in zip(case.kinds, modules, strict=True):
        tie(kind, module, head)
    names = [f"{i}_{kind}" for i, kind in enumerate(case.kinds)]
    return nn.Sequential(OrderedDict(zip([*names, "head"], [*modules, head], strict=True)))


def tie(kind: str, module: nn.Module, head: Head) -> None:
    """Tie a layer to the head, if its kind is one that is."""
    if kind == "tied_across":
        module.linear.weight = head.linear.weight
    elif kind == "same_memory_across":
        module.linear.weight.data = head.linear.weight.data
    elif kind == "shared_table":
        head.register_buffer("table", module.table)


@contextmanager
def doubles() -> Iterator[None]:
    """Build in float64: `double()` afterwards would undo strides and ties of some kinds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def layers_of(case: Case) -> list[int]:
    """Return the layer of every sublayer."""
    return [*(i for i, layer in enumerate(case.layers) for _ in layer), len(case.layers)]


def layer_model(case: Case, model: nn.Sequential) -> LayeredModel:
    """Present the model's children as its sublayers."""
    children = model.named_children()
    sublayers = [
        Sublayer(name, layer, module)
        for (name, module), layer in zip(children, layers_of(case), strict=True)
    ]
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))


def build_data(case: Case) -> TensorDataset:
    """Make inputs that the first sublayer takes, and targets that depend on them."""
    generator = torch.Generator().manual_seed(1)
    count = case.num_samples
    if case.kinds[0] == "linear":
        inputs = torch.randn(count, LENGTH, 6, generator=generator, dtype=torch.float64)
    elif case.kinds[0] == "patches":
        inputs = torch.randn(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    else:
        inputs = torch.randint(NUM_TOKENS, (count, LENGTH), generator=generator)
    batches = [ids for _, ids in case.batches()]
    return TensorDataset(inputs, targets_of(case.objective, inputs, batches))


@dataclass(frozen=True)
class Refusal:
    """Say what a rank was told instead of training.

    Args:
        message: of the error.
        changed: names of parameters whose values are no longer the initial ones.
    """

    message: str
    changed: tuple[str, ...]


def train(case: Case) -> Outcome | Refusal:
    """Train on this world; in `extra`, beside what `collect` notes, "digests" of every step."""
    model = build_model(case)
    losses, digests, evaluations = [], [], []
    try:
        trainer = make_trainer(case, model)
        with measuring(measure if case.measured else never), trainer:
            for step, _ in case.batches():
                losses.append(trainer.step().loss)
                digests.append(digests_of_this_rank(trainer))
                if step == case.look:
                    evaluations.append(trainer.evaluate(build_data(case)))
                    trainer.state_dict()
            outcome = collect(trainer, losses)
    except (ValueError, TypeError) as error:
        if losses:
            raise
        return Refusal(str(error), changed_parameters(case, model))
    # What the gathered state dict has, and what it leaves out; a tied tensor has one name.
    outcome.weights = tensors_of(model) if outcome.weights else {}
    outcome.extra.update(digests=digests, evaluations=evaluations)
    return outcome


def make_trainer(case: Case, model: nn.Sequential) -> Trainer:
    """Build the case's Trainer on this world."""
    settings = settings_of(case, case.pipelines)
    return Trainer(layer_model(case, model), build_data(case), epochs=EPOCHS, **settings)


def settings_of(case: Case, pipelines: Mapping[int, Pipeline]) -> dict[str, Any]:
    """Return the Trainer's settings for a case in some pipelines."""
    return {
        "loss_fn": case.objective.build(),
        "optimizer": case.descent.factory(),
        "freeze": FreezeTable(dict(case.frozen)),
        "plan": Forced({step: Shape(*one, spares=True) for step, one in pipelines.items()}),
        "seed": SEED,
        "global_batch_size": case.batch_size,
        "max_grad_norm": case.max_grad_norm,
        "cache": case.cache,
        "prefix_chunk": case.prefix_chunk,
        "learning_rate_schedule": slow_start,
        "freeze_interval_steps": 1,
        "evaluate_every_epochs": 0,
        "step_timeout_s": 30.0,
        "setup_timeout_s": 30.0,
        "progress": False,
    }


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, also those that a checkpoint leaves out."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in named}


def changed_parameters(case: Case, model: nn.Module) -> tuple[str, ...]:
    """Name the parameters that this rank still holds, but with other values than at first."""
    initial = dict(build_model(case).named_parameters())
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and not torch.equal(parameter, initial[name])
    )


def by_hand(case: Case) -> Outcome:
    """Train in a loop: one process, no micro-batches, no framework.

    Frozen layers are in eval mode, and whatever is trained above them in training mode. In `extra`
    are the "evaluations", and the "initial" state, which some optimizers have from the beginning.
    """
    model, data = build_model(case), build_data(case)
    loss_fn = case.objective.build()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = case.descent.factory()(named)
    rates = [group["lr"] for group in optimizer.param_groups]
    initial = {key: t.clone() for key, t in take_state(optimizer, dict(named)).items()}
    losses, evaluations = [], []
    for step, ids in case.batches():
        freeze(case, model, {p for _, p in named}, latest(case.frozen, step))
        optimizer.zero_grad(set_to_none=True)
        loss = mean(loss_fn, model(data.tensors[0][ids]), data.tensors[1][ids])
        loss.backward()
        update(case, optimizer, named, rates, step)
        losses.append(loss.item())
        if step == case.look:
            evaluations.append(evaluate(case, model))
    extra = {"evaluations": evaluations, "initial": initial}
    return Outcome(losses, tensors_of(model), take_state(optimizer, dict(named)), extra)


def update(
    case: Case,
    optimizer: Optimizer,
    parameters: list[tuple[str, nn.Parameter]],
    rates: list[float],
    at: float,
) -> None:
    """Clip the parameters' gradients, and step at the rates of where the run is, in steps."""
    if case.max_grad_norm is not None:
        nn.utils.clip_grad_norm_([p for _, p in parameters], case.max_grad_norm)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * slow_start(at, 0)
    optimizer.step()


@torch.no_grad()
def evaluate(case: Case, model: nn.Module) -> dict[str, float]:
    """Return what an evaluation over all data finds."""
    inputs, targets = build_data(case).tensors
    return judged(case, model.eval()(inputs), targets)


def judged(case: Case, output: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the mean loss, and the share of right answers where that is defined."""
    means = {"loss": mean(case.objective.build(), output, targets).item()}
    if targets.ndim == 1:
        counting = targets != IGNORED
        right = (output.argmax(dim=1) == targets)[counting]
        means["accuracy"] = right.double().mean().item()
    return means


def freeze(
    case: Case, model: nn.Sequential, trainable: set[nn.Parameter], num_frozen: int
) -> None:
    """Train the parameters above the frozen layers, among those the user trains."""
    active = set()
    for module, layer in zip(model.children(), layers_of(case), strict=True):
        module.train(layer >= num_frozen)
        # A weight that is tied to the head goes on training with it.
        active |= set(module.parameters()) if layer >= num_frozen else set()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in active & trainable)


def mean(loss_fn: LossFunction, output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss, also of a function that gives (sum, count)."""
    loss = loss_fn(output, target)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss

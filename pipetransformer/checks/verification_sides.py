"""Compare, on one process, the layers one by one with the model's own forward and loss.

Found in this order, as each would show in what follows: a forward that writes into its own
tensors or draws random numbers, sublayers that are not the model's forward, one whose output
depends on how a batch is split, and a loss that does.

Compare, on all processes, steps of real pipelines with a plain loop on rank 0.

    step       0                1                       2
    pipeline   the longest      one stage, replicas     as at 0
    moves      all layers       halfway across          back

Rank 0 steps a reference beside it, and publishes its gradients and weights; every rank compares
what it holds.

Copy a layered model to compare it with itself: in float64 where it can, without dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from autodp import broadcast_json, broadcast_tensor, gather_json
from autopipe.loss import Loss, LossFunction, refuse_split
from autopipe.plan import PipelinePlan
from pipetransformer.checks.tolerance import Tolerance
from pipetransformer.elastic import Decision, Deployment
from pipetransformer.feed import (
    Batch,
    ComingStep,
    FrozenPrefix,
    SampleFeed,
    find_changed,
    part_of,
    samples_of,
)
from pipetransformer.model import LayeredModel, Task, named_tensors
from pipetransformer.processes import World

_Result = TypeVar("_Result")


def find_difference(own: OwnForward, loss_fn: Loss, batch: Batch, tolerance: Tolerance) -> str:
    """Return what differs first, in a sentence, or ""; the twin is of no use afterwards."""
    model = own.model
    before = {name: t.detach().clone() for name, t in named_tensors(model.model).items()}
    with torch.no_grad():
        expected, outputs = _recorded(model.model, own, batch)
        if written := find_changed(named_tensors(model.model), before):
            return (
                f"the forward writes into {written!r}, and what it writes depends on how a batch "
                "is split; use a layer without running statistics"
            )
        again = own(batch)[0]
        if tolerance.difference(again.nan_to_num(), expected[0].nan_to_num()):
            return (
                "the forward gives another output for the same batch: it draws random numbers "
                "that could not be switched off, perhaps; set its dropout to 0 before the model "
                "is verified"
            )
        return (
            _compare_forward(model, batch, expected[0], outputs, tolerance)
            or _find_split(model, batch, tolerance)
            or _refused_loss(own, loss_fn, batch)
        )


def _compare_forward(
    model: LayeredModel,
    batch: Batch,
    expected: Tensor,
    outputs: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> str:
    layered, ours = _recorded(model.model, model.run, batch)
    by = tolerance.difference(layered, expected)
    if not by:
        return ""
    shared = (name for name in outputs if name in ours)
    wrong = (name for name in shared if tolerance.difference(ours[name], outputs[name]))
    first = next(wrong, None)
    where = f"first in the output of {first!r}" if first else "behind the last module they share"
    return (
        "the model's own forward and its sublayers in order give other outputs "
        f"({by}), {where}; give the LayeredModel sublayers that do all that the forward does"
    )


def _find_split(model: LayeredModel, batch: Batch, tolerance: Tolerance) -> str:
    """Give each sublayer a batch, and its parts; both must give the same."""
    num_samples = len(batch[model.inputs[0]])
    cuts = (slice(0, num_samples // 2), slice(num_samples // 2, num_samples))
    value: Tensor | Batch = batch
    for index, sublayer in enumerate(model.sublayers):
        whole = model.call(index, value, sides=batch)
        joined = torch.cat(
            [model.call(index, part_of(value, cut), sides=part_of(batch, cut)) for cut in cuts]
        )
        if by := tolerance.difference(joined, whole):
            return (
                f"the output of sublayer {sublayer.name!r} depends on how a batch is split "
                f"({by}); let it treat each sample by itself"
            )
        value = whole
    return ""


def _refused_loss(own: OwnForward, loss_fn: Loss, batch: Batch) -> str:
    """Say that a loss depends on how a batch is split, also one that is known to be exact."""
    try:
        refuse_split(Loss(loss_fn.function), own(batch)[0], own.model.targets_of(batch))
    except ValueError as error:
        return str(error)
    return ""


def _recorded(
    model: nn.Module, run: Callable[[Batch], _Result], batch: Batch
) -> tuple[_Result, dict[str, Tensor]]:
    """Run something, and note the output of each module, in the order in which they end."""
    names = {module: name for name, module in model.named_modules() if name}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _inputs: object, output: object) -> None:
        if module in names and isinstance(output, Tensor):
            outputs.setdefault(names[module], output.detach().clone())

    with register_module_forward_hook(note):
        return run(batch), outputs


@dataclass(frozen=True)
class _Step:
    """Hold what the reference did in a step; gradients that are none are left out."""

    loss: float
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]


def compare_steps(
    task: Task, world: World, *, own: OwnForward | None, batch: Batch, tolerance: Tolerance
) -> str:
    """Return what differs first, in a sentence, or ""; the same on every rank. Collective.

    Task and `own` have twins of the model, complete on rank 0; `own` is nowhere else.
    """
    reference = _Reference(task, own, batch) if own is not None else None
    for index in range(len(task.model.sublayers)):
        # As if they had come from elsewhere, also where there is one process.
        held = task.model.tensors(index).items()
        task.model.replace(index, {n: t.detach().clone() for n, t in held if not t.is_meta})
    num_samples = len(batch[task.model.inputs[0]])
    samples = [{name: t[i] for name, t in batch.items()} for i in range(num_samples)]
    feed = SampleFeed(FrozenPrefix(task), world, samples_of(task, samples))
    deployment = Deployment(task, world, feed)
    try:
        for number, plan in enumerate(_plans(task.model, world, num_samples)):
            deployment.change(Decision(number, 0, plan, False, "to verify"))
            stage = deployment.active_stage
            coming = ComingStep(torch.arange(num_samples), number, lambda layer: 1.0)
            result = stage.train_step(coming, feed.rows(0))
            step = _publish(reference.step() if reference else None, task.model, world)
            found = _compare(
                result.loss, stage.parameters, step, model=task.model, tolerance=tolerance
            )
            # The lowest sublayer's, where several ranks find something.
            findings = [one for one in gather_json(found, group=world.group) if one]
            if findings:
                shape = f"K x R = {plan.length} x {stage.topology.replicas}"
                return f"in step {number} ({shape}) {min(findings)[1]}"
    finally:
        deployment.close()
        feed.close()
    return ""


def _plans(model: LayeredModel, world: World, num_samples: int) -> Iterator[PipelinePlan]:
    """Yield the pipelines to verify, with unequal micro-batches where they can be."""
    count = len(model.sublayers)
    possible = [length for length in world.lengths if length <= count]
    for length in (max(possible), min(possible), max(possible)):
        replicas = world.topology(length).replicas
        bounds = tuple(count * stage // length for stage in range(length + 1))
        per_replica = -(-num_samples // replicas)
        micro_batches = min(3 if length == 1 else 2, per_replica)
        yield PipelinePlan(length, bounds, micro_batches, "1f1b", 0.0, (0,) * length)


class _Reference:
    """Train the model's own forward in a plain loop, on rank 0."""

    def __init__(self, task: Task, own: OwnForward, batch: Batch) -> None:
        self._own, self._batch, self._model = own, batch, own.model.model.train()
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(name in task.trainable)
        self._named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._optimizer = task.optimizer(self._named) if self._named else None

    def step(self) -> _Step:
        self._model.zero_grad()
        _, loss = self._own(self._batch)
        if loss.requires_grad:
            loss.backward()
        gradients = {n: p.grad.clone() for n, p in self._named if p.grad is not None}
        if self._optimizer is not None:
            self._optimizer.step()
        tensors = {name: t.detach() for name, t in named_tensors(self._model).items()}
        return _Step(float(loss.detach()), gradients, tensors)


def _publish(step: _Step | None, model: LayeredModel, world: World) -> _Step:
    if world.group is None:
        assert step is not None
        return step
    known = step or _Step(0.0, {}, {})
    told = [known.loss, list(known.gradients), list(known.tensors)]
    loss, trained, names = broadcast_json(told, group=world.group)

    def shared(name: str, held: Mapping[str, Tensor]) -> Tensor:
        like = model.tensor(name)
        value = torch.empty(like.shape, dtype=like.dtype)
        if name in held:
            value.copy_(held[name])
        broadcast_tensor(value, 0, group=world.group, what="the plain loop's tensors")
        return value

    gradients = {name: shared(name, known.gradients) for name in trained}
    return _Step(loss, gradients, {name: shared(name, known.tensors) for name in names})


def _compare(
    loss: float,
    parameters: Mapping[str, nn.Parameter],
    step: _Step,
    *,
    model: LayeredModel,
    tolerance: Tolerance,
) -> tuple[int, str] | None:
    """Return where in the model this rank finds the first difference, and what it is."""
    if tolerance.difference(torch.tensor([loss]), torch.tensor([step.loss])):
        return -1, f"the loss is {loss:.9g}, and {step.loss:.9g} in a plain loop"
    largest = max((float(g.abs().max()) for g in step.gradients.values() if g.numel()), default=0)
    for index in range(len(model.sublayers)):
        for name, tensor in model.tensors(index).items():
            if tensor.is_meta:
                continue
            expected = step.gradients.get(name)
            if name in parameters:
                ours = parameters[name].grad
                if (ours is None) != (expected is None):
                    state = "no gradient" if ours is None else "a gradient"
                    return index, f"{name!r} has {state}, unlike in a plain loop"
                if ours is not None and expected is not None:
                    if by := tolerance.difference(ours.cpu(), expected, scale=1e-3 * largest):
                        return index, f"the gradient of {name!r} differs {by}"
            if wrong := _compare_tensor(name, tensor, step, expected, tolerance):
                return index, wrong
    return None


def _compare_tensor(
    name: str, tensor: Tensor, step: _Step, gradient: Tensor | None, tolerance: Tolerance
) -> str:
    ours, expected = tensor.detach().cpu(), step.tensors[name]
    if gradient is not None:
        if tolerance.absolute > 1e-9:
            return ""  # Adam divides by what may be rounding alone.
        told = gradient.abs() > 1e-9
        ours, expected = ours[told], expected[told]
    if by := tolerance.difference(ours, expected):
        kind = "the weight" if isinstance(tensor, nn.Parameter) else "the buffer"
        return f"{kind} {name!r} differs after the update {by}"
    return ""


_CHANCES = ("p", "prob", "drop_prob", "drop_rate", "dropout_prob", "dropout_rate", "rate")
"""Under these names do modules that only drop keep their probability."""
_DROPOUTS = ("dropout", "dropout_p", "attention_dropout", "attn_dropout", "attn_drop")
"""Under these names do other modules keep the probability with which they drop."""


def make_twin(model: LayeredModel, dtype: torch.dtype) -> LayeredModel:
    """Return an independent copy, whose floating tensors have a dtype and which drops nothing."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"this {type(model.model).__name__} cannot be copied, and so not be verified: {error}"
        ) from error
    for name, tensor in named_tensors(model.model).items():
        # torch copies a parameter without what is noted on it.
        vars(twin.tensor(name)).update(vars(tensor))
    twin.convert(dtype)
    roots = [twin.model, *(sublayer.module for sublayer in twin.sublayers)]
    for module in chain.from_iterable(root.modules() for root in roots):
        only_drops = "drop" in type(module).__name__.lower()
        for name in _CHANCES if only_drops else _DROPOUTS:
            chance = vars(module).get(name)
            if isinstance(chance, float) and 0 < chance < 1:
                setattr(module, name, 0.0)
    return twin


def converted(batch: Mapping[str, Tensor], dtype: torch.dtype) -> Batch:
    """Return a batch whose floating entries have a dtype."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


@dataclass(frozen=True)
class OwnForward:
    """Call a model's own forward, and its loss, as a user would.

    Without a `loss_fn` that is the loss that the model itself returns or, where it returns none,
    its adapter's.
    """

    model: LayeredModel
    loss_fn: LossFunction | None

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (output, mean loss)."""
        model = self.model
        sides = model.sides_of(0, len(model.sublayers))
        keywords = {n: batch[n] for n in (*model.inputs[1:], *sides) if n in batch}
        first = batch[model.inputs[0]]
        kinds = type(model.model).__mro__
        is_of_transformers = any(kind.__module__.startswith("transformers.") for kind in kinds)
        answers_loss = self.loss_fn is None and is_of_transformers
        if answers_loss:
            keywords |= {name: batch[name] for name in model.targets}
        answer = model.model(first, **keywords)
        output = _output_of(answer)
        if answers_loss and answer.loss is not None:
            return output, answer.loss
        loss_fn = self.loss_fn or model.loss_fn
        assert loss_fn is not None, "choose_loss has found one"
        value = loss_fn(output, model.targets_of(batch))
        return output, value[0] / value[1] if isinstance(value, tuple) else value


def _output_of(answer: Any) -> Tensor:
    """Return the tensor that a loss takes: an answer itself, or its logits."""
    if isinstance(answer, Tensor):
        return answer
    logits = getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    ends = [getattr(answer, name, None) for name in ("start_logits", "end_logits")]
    if all(isinstance(one, Tensor) for one in ends):
        return torch.stack([one for one in ends if isinstance(one, Tensor)], dim=-1)
    raise TypeError(
        f"the model's own forward returned a {type(answer).__name__}, in which no output is known"
    )

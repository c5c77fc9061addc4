"""Compare, on all processes, steps of real pipelines with a plain loop on rank 0.

    step       0                1                       2
    pipeline   the longest      one stage, replicas     as at 0
    moves      to stages        halfway across          back

Rank 0 steps a reference beside it, and publishes its gradients and weights. Every rank compares
the layers that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autodp import broadcast_json, broadcast_tensor, gather_json
from autopipe.plan import PipelinePlan
from pipetransformer.checks.twins import OwnForward, find_gap
from pipetransformer.elastic import Decision, Deployment
from pipetransformer.feed import Batch, ComingStep, FrozenPrefix, SampleFeed, samples_of
from pipetransformer.model import LayeredModel, Task, named_tensors
from pipetransformer.processes import World


@dataclass(frozen=True)
class _Step:
    """Hold a step of the reference: its loss, its gradients, and the tensors after it."""

    loss: float
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]


def compare_steps(
    task: Task, world: World, *, own: OwnForward | None, batch: Batch, dtype: torch.dtype
) -> str:
    """Return the first difference in a sentence, or "", the same on every rank. Collective.

    Args:
        task: with a twin of the model, complete on rank 0.
        own: with another twin, on rank 0 only.
        dtype: the coarsest that the twins compute in.
    """
    reference = _Reference(task, own, batch) if own is not None else None
    for index in range(len(task.model.sublayers)):
        # Copies, as after a move between ranks: one process must find the same faults.
        held = task.model.tensors(index).items()
        task.model.replace(index, {n: t.detach().clone() for n, t in held if not t.is_meta})
    num_samples = len(batch[task.model.inputs[0]])
    samples = [{name: t[i] for name, t in batch.items()} for i in range(num_samples)]
    prefix = FrozenPrefix(task)
    feed = SampleFeed(prefix, world, samples_of(task, samples))
    deployment = Deployment(task, world, prefix)
    try:
        for number, plan in enumerate(_plans(task, world, num_samples)):
            deployment.change(Decision(number, 0, plan, False, "to verify"))
            feed.follow_prefix()
            stage = deployment.active_stage
            coming = ComingStep(torch.arange(num_samples), number, 0, True, 1.0)
            result = stage.train_step(coming, feed.rows(0))
            step = _publish(reference.step() if reference else None, task.model, world)
            # An update makes what float32 has rounded some ten times larger.
            growth = 1.0 if dtype == torch.float64 else 10.0**number
            ours = stage.trained.parameters
            difference = _compare(
                result.loss, ours, step, model=task.model, dtype=dtype, growth=growth
            )
            findings = [one for one in gather_json(difference, group=world.group) if one]
            if findings:
                shape = f"K x R = {plan.length} x {stage.topology.replicas}"
                # The smallest is the lowest sublayer's, in which later differences begin.
                return f"in step {number} ({shape}) {min(findings)[1]}"
    finally:
        deployment.close()
        feed.close()
    return ""


def _plans(task: Task, world: World, num_samples: int) -> Iterator[PipelinePlan]:
    """Yield the pipelines to verify, with unequal micro-batches where they can be."""
    count, recomputes = len(task.model.sublayers), task.config.activation_checkpointing is True
    # Parts, and the rest, are run by the model's own forward, which is on one rank as a whole.
    most = 1 if task.model.parts else count
    possible = [length for length in world.lengths if length <= most]
    for length in (max(possible), min(possible), max(possible)):
        replicas = world.topology(length).replicas
        bounds = tuple(count * stage // length for stage in range(length + 1))
        per_replica = -(-num_samples // replicas)
        micro_batches = min(3 if length == 1 else 2, per_replica)
        needs = (0,) * length
        yield PipelinePlan(
            length, bounds, micro_batches, "1f1b", 0.0, needs, recomputes=recomputes
        )


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
    """Return rank 0's step on every rank. Collective."""
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
    dtype: torch.dtype,
    growth: float,
) -> tuple[int, str] | None:
    """Return this rank's first difference, with its sublayer; -1 is the loss."""
    if find_gap(torch.tensor([loss]), torch.tensor([step.loss]), dtype):
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
                    # A gradient that is 0 but for rounding is compared on the others' scale.
                    largest_here = float(expected.abs().max()) if expected.numel() else 0.0
                    scale = max(1e-3 * largest, growth * largest_here)
                    if by := find_gap(ours.cpu(), expected, dtype, scale=scale):
                        return index, f"the gradient of {name!r} differs {by}"
            if wrong := _compare_tensor(name, tensor, step, expected, dtype):
                return index, wrong
    return None


def _compare_tensor(
    name: str, tensor: Tensor, step: _Step, gradient: Tensor | None, dtype: torch.dtype
) -> str:
    ours, expected = tensor.detach().cpu(), step.tensors[name]
    if gradient is not None:
        if dtype != torch.float64:
            return ""  # Adam divides by what may be rounding alone.
        told = gradient.abs() > 1e-9
        ours, expected = ours[told], expected[told]
    if by := find_gap(ours, expected, dtype):
        kind = "the weight" if isinstance(tensor, nn.Parameter) else "the buffer"
        return f"{kind} {name!r} differs after the update {by}"
    return ""

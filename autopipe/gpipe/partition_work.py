"""Compute one partition of a GPipe module on a micro-batch.

A forward is repeated only in its own modes and with its own weights. Legend: F, R, B are a
forward, its repetition, its backward; the caller's code may run between them.

    F   model.eval()         R   B     R runs in the modes of F; then the caller's are restored
    F   weight.mul_(2)       R   B     refused
    F   F, another batch     R   B     allowed: forwards may change buffers such as statistics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from autopipe.engine import (
    ForwardPass,
    Gradients,
    Payload,
    StageWork,
    Starts,
    current_forward_pass,
    cut,
)
from autopipe.gpipe.batch_norm import running_statistics_kept
from autopipe.gpipe.micro_batch import as_batch, as_payload
from autopipe.skip import SkipEdge, using
from autopipe.threads import CallerSettings, Randomness


@dataclass(frozen=True)
class Partition:
    """Describe one partition: layers, device, trained tensors, skips from below and to above."""

    module: nn.Module
    device: torch.device
    parameters: tuple[Tensor, ...]
    arriving: tuple[SkipEdge, ...]
    leaving: tuple[SkipEdge, ...]


def trained_tensors(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters and other leaves of the layers that need a gradient."""
    # Leaves only: an attribute that is none may be an earlier forward's, with a foreign graph.
    attributes = [value for layer in module.modules() for value in vars(layer).values()]
    held = [value for value in attributes if isinstance(value, Tensor) and value.is_leaf]
    tensors = dict.fromkeys([*module.parameters(), *held])
    return tuple(tensor for tensor in tensors if tensor.requires_grad)


def needs_gradient(partitions: Sequence[Partition], inputs: Payload) -> bool:
    """Return whether a parameter or an input of a pipeline needs a gradient."""
    input_needs = any(tensor is not None and tensor.requires_grad for tensor in inputs.tensors)
    return input_needs or any(partition.parameters for partition in partitions)


def check_trains(partitions: Sequence[Partition], inputs: Payload) -> None:
    """Raise ValueError where no backward could follow."""
    if not needs_gradient(partitions, inputs):
        raise ValueError(
            "nothing would train: no parameter and no input needs a gradient; set requires_grad "
            "where there is to be one, or call the module for an output alone"
        )


@dataclass
class Ends:
    """Hold, by micro-batch, what enters the first partition and leaves the last, without graphs.

    Outputs get the caller's gradients, or a loss gives a micro-batch's value to back-propagate.
    """

    inputs: list[Payload]
    outputs: dict[int, Payload] = field(default_factory=dict)
    output_gradients: list[Gradients] = field(default_factory=list)
    loss: Callable[[int, Payload], Tensor] | None = None

    def input_of(self, micro_batch: int) -> Payload:
        return self.inputs[micro_batch]


class PartitionWork(StageWork):
    def __init__(
        self, partition: Partition, ends: Ends, settings: CallerSettings, randomness: Randomness
    ) -> None:
        self.gradients: dict[Tensor, Tensor] = {}
        self._partition, self._ends = partition, ends
        self._settings, self._randomness = settings, randomness
        self._arriving = [key for edge in partition.arriving for key in edge.keys]
        self._leaving = [key for edge in partition.leaving for key in edge.keys]
        # Sums made here may be added to in place; autograd's own gradients may be shared.
        self._summed: set[Tensor] = set()

    def first_input(self, micro_batch: int) -> Payload:
        return self._ends.input_of(micro_batch)

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        module, current = self._partition.module, _present()
        first_skip = len(inputs.tensors) - len(self._arriving)
        store = dict(zip(self._arriving, inputs.tensors[first_skip:], strict=True))
        hidden = as_batch(replace(inputs, tensors=inputs.tensors[:first_skip]))
        # Else this frame would keep the skips alive through the whole forward.
        del inputs
        statistics = running_statistics_kept(module) if current.recomputing else nullcontext()
        with using(store), self._settings.autocast(), statistics, self._randomness.of(current):
            value = module(hidden)
        outputs = as_payload(value, what="a partition's output")
        skips = tuple(store.pop(key) for key in self._leaving)
        return Payload(outputs.tensors + skips, outputs.is_bare)

    def finish(self, micro_batch: int, outputs: Payload) -> Tensor | None:
        current = _present()
        if self._ends.loss is None:
            if not current.recomputing:
                self._ends.outputs[micro_batch] = cut(outputs)
            return None
        if current.checkpointing and any(
            t is not None and t.requires_grad for t in outputs.tensors
        ):
            return None  # The repetition computes the loss.
        with self._settings.autocast():
            return self._ends.loss(micro_batch, outputs)

    def output_gradients(self, micro_batch: int) -> Gradients:
        return self._ends.output_gradients[micro_batch]

    def backward(
        self,
        micro_batch: int,
        starts: Starts,
        gradients: Sequence[Tensor] | None,
        anchors: Gradients,
        *,
        retain: bool,
    ) -> Gradients:
        """Back-propagate; sum the parameters' gradients here, not in their `grad`."""
        parameters = self._partition.parameters
        leaves = [anchor for anchor in anchors if anchor is not None]
        found = torch.autograd.grad(
            starts, [*leaves, *parameters], gradients, retain_graph=retain, allow_unused=True
        )
        for parameter, gradient in zip(parameters, found[len(leaves) :], strict=True):
            if gradient is not None:
                self._add(parameter, gradient)
        of_leaves = iter(found)
        return tuple(None if anchor is None else next(of_leaves) for anchor in anchors)

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        total = self.gradients.get(parameter)
        if total is None:
            self.gradients[parameter] = gradient
        elif parameter in self._summed:
            total += gradient
        else:
            self.gradients[parameter] = total + gradient
            self._summed.add(parameter)

    def take_gradients(self) -> dict[Tensor, Tensor]:
        """Return and forget the sums over all micro-batches."""
        gradients, self.gradients = self.gradients, {}
        self._summed.clear()
        return gradients


def _present() -> ForwardPass:
    current = current_forward_pass()
    assert current is not None
    return current


@contextmanager
def hooks_held(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks from seeing parts of a gradient; they fire once, for the whole gradient."""
    # torch calls what this dictionary holds; there is no other way to suspend a hook.
    held = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in held:
            hooks.update(content)


class AsInForward:
    """Record a partition's modes, weights and buffers before a mini-batch's forwards."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._modes = [(part, part.training) for part in partition.module.modules()]
        self._found = _marks(partition)

    def end_forwards(self) -> None:
        """Forget tensors that the forwards themselves have changed."""
        after = _marks(self._partition)
        self._found = {n: mark for n, mark in self._found.items() if after.get(n) == mark}

    def refuse_changes(self) -> None:
        """Raise RuntimeError if a weight or buffer has changed."""
        present = _marks(self._partition)
        if changed := [n for n, mark in self._found.items() if present.get(n) != mark]:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise RuntimeError(
                f"{changed[0]!r}{others} changed between the forward and the backward, so that a "
                "checkpointed forward cannot be repeated; change weights behind the backward, or "
                "use checkpoint='never'"
            )

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Put the partition's modules into the forward's modes inside."""
        others = [(part, mode) for part, mode in self._modes if part.training != mode]
        try:
            for part, mode in others:
                part.training = mode
            yield
        finally:
            for part, mode in others:
                part.training = not mode


@dataclass(frozen=True)
class _Mark:
    """Identify a tensor's content; the tensor is held, so that no other gets its id.

    `tensor.data = other` changes the address of its memory, but not the version.
    """

    identity: int
    version: int
    address: int
    tensor: Tensor = field(compare=False)


def _marks(partition: Partition) -> dict[str, _Mark]:
    """Mark everything that a forward reads besides its input, by name, frozen weights included."""
    module = partition.module
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known = {id(tensor) for tensor in named.values()}
    held = [tensor for tensor in partition.parameters if id(tensor) not in known]
    named |= {f"held tensor {n}": tensor for n, tensor in enumerate(held)}
    return {name: _mark(tensor) for name, tensor in named.items()}


def _mark(tensor: Tensor) -> _Mark:
    # A lazy parameter has no memory before the first forward; a sparse one has two storages.
    has_address = not nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided
    return _Mark(
        id(tensor),
        -1 if tensor.is_inference() else tensor._version,
        tensor.data_ptr() if has_address else 0,
        tensor,
    )

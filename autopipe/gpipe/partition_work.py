"""Say what one partition of a GPipe module computes on a micro-batch.

Let a forward be repeated only as it was: in its modes, with its weights.

Legend: F, R, B a forward, its repetition, its backward; between them the caller's own code.

    F   model.eval()         R   B     R runs in the modes of F; the caller's are put back
    F   weight.mul_(2)       R   B     refused
    F   F, another batch     R   B     what a forward changes itself, as statistics, may change
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
    """Describe one partition: layers, place, what they train, skips from below and to above."""

    module: nn.Module
    device: torch.device
    parameters: tuple[Tensor, ...]
    arriving: tuple[SkipEdge, ...]
    leaving: tuple[SkipEdge, ...]


def trained_tensors(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters that need a gradient, and such leaves as layers hold besides."""
    # What is no leaf may be left there by an earlier forward, with a graph that is none of ours.
    attributes = [value for layer in module.modules() for value in vars(layer).values()]
    held = [value for value in attributes if isinstance(value, Tensor) and value.is_leaf]
    found = dict.fromkeys([*module.parameters(), *held])
    return tuple(tensor for tensor in found if tensor.requires_grad)


def needs_gradient(partitions: Sequence[Partition], inputs: Payload) -> bool:
    """Tell whether a parameter or an input of a pipeline needs a gradient."""
    given = any(tensor is not None and tensor.requires_grad for tensor in inputs.tensors)
    return given or any(partition.parameters for partition in partitions)


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

    A loss gives what to back-propagate; without one the caller's backward gives gradients.
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
        # A sum of ours may be added to in place; a gradient autograd gave may be shared.
        self._summed: set[Tensor] = set()

    def first_input(self, micro_batch: int) -> Payload:
        return self._ends.input_of(micro_batch)

    def forward(self, micro_batch: int, inputs: Payload) -> Payload:
        module, current = self._partition.module, _present()
        first_skip = len(inputs.tensors) - len(self._arriving)
        store = dict(zip(self._arriving, inputs.tensors[first_skip:], strict=True))
        hidden = as_batch(replace(inputs, tensors=inputs.tensors[:first_skip]))
        # A tensor that only this frame held would live as long as the partition's forward.
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
            return None  # The repetition computes it.
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
        """Back-propagate; the parameters' gradients are summed here, apart from their `grad`."""
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
        """Return the sums over all micro-batches, and start over."""
        gradients, self.gradients = self.gradients, {}
        self._summed.clear()
        return gradients


def _present() -> ForwardPass:
    current = current_forward_pass()
    assert current is not None
    return current


@contextmanager
def hooks_held(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks from seeing parts of a gradient; they fire once, when autograd gets the whole."""
    # torch calls whatever this dictionary holds, and has no other way to leave a hook out.
    held = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in held:
            hooks.update(content)


class AsInForward:
    """Hold what a partition's forwards of a mini-batch found, until they are repeated.

    Made before the first of them.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._modes = [(part, part.training) for part in partition.module.modules()]
        self._found = _marks(partition)

    def end_forwards(self) -> None:
        """Forget what the forwards themselves have changed."""
        after = _marks(self._partition)
        self._found = {n: mark for n, mark in self._found.items() if after.get(n) == mark}

    def refuse_changes(self) -> None:
        """Raise RuntimeError if a weight or buffer is no longer what it was."""
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
        """Put the partition's modules into the modes of the forward, inside."""
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
    """Tell a tensor's content from a later one, as autograd does, and by where it lies.

    Args:
        identity: of the tensor, which is held so that no other has its number.
        version: how often it was changed in place.
        address: of its memory, which `tensor.data = other` changes and no version tells of.
    """

    identity: int
    version: int
    address: int
    tensor: Tensor = field(compare=False)


def _marks(partition: Partition) -> dict[str, _Mark]:
    """Mark all that a forward reads beside its input, by name; frozen weights, too."""
    module = partition.module
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known = {id(tensor) for tensor in named.values()}
    held = [tensor for tensor in partition.parameters if id(tensor) not in known]
    named |= {f"held tensor {n}": tensor for n, tensor in enumerate(held)}
    return {name: _mark(tensor) for name, tensor in named.items()}


def _mark(tensor: Tensor) -> _Mark:
    # A lazy layer's has no memory before its first forward, a sparse one's lies in two places.
    has_address = not nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided
    return _Mark(
        id(tensor),
        -1 if tensor.is_inference() else tensor._version,
        tensor.data_ptr() if has_address else 0,
        tensor,
    )

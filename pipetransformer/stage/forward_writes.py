"""Notice a forward that writes into its own parameters or buffers.

What a forward writes depends on the samples it was given, and so on K, M and R: running
statistics, the vectors of spectral_norm, an embedding's max_norm, a counter. Replicas would drift
apart, and frozen layers would give other activations to whoever computed more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopipe.profile import ProfiledSublayer
from pipetransformer.adapters import LayeredModel
from pipetransformer.data import Batch
from pipetransformer.job import Task
from pipetransformer.measure import forward, run_spans
from pipetransformer.processes import World, agree

_PROBES = 2


@dataclass
class _Watched:
    """Hold a tensor as it was: the object, how often it was written to, and a buffer's values."""

    index: int
    name: str
    tensor: Tensor
    version: int
    values: Tensor | None


class ForwardWrites:
    """Watch the tensors of sublayers for writes between `begin` and `find`.

    Args:
        model: whose tensors these are.
        indices: the sublayers.
    """

    def __init__(self, model: LayeredModel, indices: Sequence[int]) -> None:
        self._model = model
        self._watched = [
            _Watched(
                index,
                name,
                tensor,
                tensor._version,
                None if isinstance(tensor, nn.Parameter) else tensor.clone(),
            )
            for index in indices
            for name, tensor in model.tensors(index).items()
        ]

    def begin(self) -> None:
        """Forget what was written so far, as an optimizer does between two forwards."""
        for one in self._watched:
            one.version = one.tensor._version

    def find(self) -> str:
        """Say what was written since `begin`, or ""; a buffer may get the values it had."""
        for one in self._watched:
            if one.values is None:
                written = one.tensor._version != one.version
            else:
                written = self._buffer_changed(one)
            if written:
                return _refusal(one.name, self._model.sublayers[one.index].name)
        return ""

    def _buffer_changed(self, one: _Watched) -> bool:
        now = self._model.tensor(one.name)
        if now is one.tensor and now._version == one.version:
            return False
        one.tensor, one.version = now, now._version
        assert one.values is not None
        return not torch.equal(now, one.values)


def refuse_forward_writes(task: Task, world: World, read: Callable[[Tensor], Batch]) -> None:
    """Run samples through every sublayer, in training and in eval mode; refuse one that writes.

    Buffers, random numbers and modes are then as they were. Collective.

    Args:
        task, world: what is trained, and where; nothing is frozen yet, or held elsewhere.
        read: reads samples of the training set; ids may exceed its length.
    Raises:
        ValueError: on every rank: a sublayer changes its own tensors.
    """
    model, device = task.model, world.device

    def try_out() -> None:
        batch = {name: t.to(device) for name, t in read(torch.arange(_PROBES)).items()}
        singly = [range(index, index + 1) for index in range(len(model.sublayers))]
        run_spans(task, device, singly, [batch], refuse)

    def refuse(sublayers: list[ProfiledSublayer], inputs: list[Batch]) -> None:
        (sublayer,) = sublayers
        named = [*sublayer.module.named_parameters(), *sublayer.module.named_buffers()]
        before = {name: tensor.detach().clone() for name, tensor in named}
        for training in (True, False):
            sublayer.module.train(training)
            forward(sublayers, inputs[0])
            for name, tensor in (
                *sublayer.module.named_parameters(),
                *sublayer.module.named_buffers(),
            ):
                if name in before and not _same(tensor, before[name]):
                    raise ValueError(_refusal(name, sublayer.name))

    agree(try_out, group=world.group)


def _same(one: Tensor, other: Tensor) -> bool:
    # A NaN that was there before is no change.
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _refusal(tensor: str, sublayer: str) -> str:
    return (
        f"the forward of sublayer {sublayer!r} writes into its own {tensor!r}; what it writes "
        "depends on how a batch is split over micro-batches and replicas, which would drift "
        "apart: use a layer without running statistics, power iteration or max_norm, or compute "
        "what it needs within each forward"
    )

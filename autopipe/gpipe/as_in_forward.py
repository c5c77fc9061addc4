"""Let a forward be repeated only as it was: in its modes, with its weights.

Legend: F, R, B a forward, its repetition, its backward; between them the caller's own code.

    F   model.eval()         R   B     R runs in the modes of F; the caller's are put back
    F   weight.mul_(2)       R   B     refused
    F   F, another batch     R   B     what a forward changes itself, as statistics, may change
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopipe.gpipe.partition_work import Partition


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

"""Split a mini-batch into micro-batches, and join their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Gradients, Payload
from autopipe.schedule import micro_batch_sizes

Batch = Tensor | tuple[Tensor, ...]
"""What a GPipe takes and returns: a tensor or a tuple of tensors, (B, ...)."""


def as_payload(value: Any, *, what: str) -> Payload:
    """Wrap a tensor or a tuple of tensors; raise TypeError for anything else."""
    members = value if isinstance(value, tuple) else (value,)
    for position, member in enumerate(members):
        if not isinstance(member, Tensor):
            where = f"a tuple whose entry {position} is " if isinstance(value, tuple) else ""
            raise TypeError(
                f"{what} is {where}a {type(member).__name__}; a pipeline can only carry a Tensor "
                f"or a tuple of Tensors"
            )
    return Payload(members, is_bare=isinstance(value, Tensor))


def as_batch(payload: Payload) -> Any:
    return payload.tensors[0] if payload.is_bare else payload.tensors


def split_sizes(payload: Payload, chunks: int) -> tuple[int, ...]:
    """Return the samples of each of `chunks` micro-batches; fewer if there are fewer samples."""
    tensors = [tensor for tensor in payload.tensors if tensor is not None]
    if not tensors:
        raise ValueError("the input is an empty tuple; give at least one tensor")
    if any(tensor.ndim == 0 for tensor in tensors):
        raise ValueError(
            "the input holds a 0-dim tensor; each needs a first dimension, the samples"
        )
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the input's tensors have {lengths} samples; they must have equally many"
        )
    # An empty mini-batch is one empty micro-batch.
    return micro_batch_sizes(lengths[0], max(1, min(chunks, lengths[0])))


def scatter(payload: Payload, sizes: Sequence[int]) -> list[Payload]:
    """Split a batch into micro-batches, which share its memory but not its graph."""
    # Detached: each micro-batch starts a graph of its own.
    tensors = [tensor.detach() for tensor in payload.tensors if tensor is not None]
    if len(sizes) == 1:
        return [Payload(tuple(tensors), payload.is_bare)]
    pieces = zip(*(tensor.split(list(sizes)) for tensor in tensors), strict=True)
    return [Payload(piece, payload.is_bare) for piece in pieces]


@dataclass(frozen=True)
class Gathered:
    """Hold a mini-batch's joined outputs, without a graph; lengths are of each tensor's parts."""

    payload: Payload
    lengths: tuple[tuple[int, ...], ...]
    need_gradient: tuple[bool, ...]


def gather(outputs: Sequence[Payload]) -> Gathered:
    """Concatenate the micro-batches' outputs; a ValueError if they do not fit together."""
    if len({(payload.is_bare, len(payload.tensors)) for payload in outputs}) > 1:
        raise ValueError(
            "the last layer returned more tensors for some micro-batches than for others"
        )
    columns = [
        [t for t in column if t is not None]
        for column in zip(*(payload.tensors for payload in outputs), strict=True)
    ]
    if len(outputs) > 1 and any(tensor.ndim == 0 for column in columns for tensor in column):
        raise ValueError(
            f"the last layer returned a 0-dim tensor for each of {len(outputs)} micro-batches; a "
            "pipeline's outputs are put together along the first dimension: return one value a "
            "sample, or compute the loss outside"
        )
    with torch.no_grad():
        tensors = tuple(
            torch.cat(column) if len(column) > 1 else column[0].detach() for column in columns
        )
    # A 0-dim output can only be a single micro-batch's; it counts as one value.
    return Gathered(
        Payload(tensors, outputs[0].is_bare),
        tuple(tuple(len(t) if t.ndim else 1 for t in column) for column in columns),
        tuple(any(tensor.requires_grad for tensor in column) for column in columns),
    )


def split_gradients(gradients: Gradients, lengths: Sequence[Sequence[int]]) -> list[Gradients]:
    """Split the gradients of gathered outputs by micro-batch; lengths are `Gathered.lengths`."""
    num_micro_batches = len(lengths[0])
    if num_micro_batches == 1:
        return [gradients]
    columns = [
        [None] * num_micro_batches if gradient is None else list(gradient.split(list(length)))
        for gradient, length in zip(gradients, lengths, strict=True)
    ]
    return list(zip(*columns, strict=True))

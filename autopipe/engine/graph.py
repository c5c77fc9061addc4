"""Cut a model's graph at stage boundaries: each micro-batch has its own on each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.engine.link import Gradients, Payload

Starts = Sequence[Tensor] | Sequence[GradientEdge]
"""Where a backward starts: a loss, or places in the graph."""


@dataclass(frozen=True)
class Roots:
    """Say where the backward of one micro-batch starts on one stage.

    At a loss, without `positions`; or at the places in the graph of the outputs that need a
    gradient, at those positions: a place does not keep the output's memory.
    """

    starts: Starts
    positions: tuple[int, ...] | None

    @staticmethod
    def of(outputs: Payload, loss: Tensor | None) -> Roots:
        if loss is not None:
            return Roots((loss,) if loss.requires_grad else (), None)
        found = {n: tensor for n, tensor in enumerate(outputs.tensors) if needs_gradient(tensor)}
        return Roots(tuple(map(get_gradient_edge, found.values())), tuple(found))

    def with_gradients(self, gradients: Gradients) -> tuple[Starts, list[Tensor]]:
        """Pair the starts with what came for them; those that get no gradient are left out."""
        assert self.positions is not None, "a loss takes no gradient"
        found = [
            (cast(GradientEdge, start), gradient)
            for start, n in zip(self.starts, self.positions, strict=True)
            if (gradient := gradients[n]) is not None
        ]
        return [start for start, _ in found], [gradient for _, gradient in found]


def needs_gradient(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.requires_grad


class _Entry(torch.autograd.Function):
    """Give the layers data whose gradient arrives at an anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(inputs: Payload) -> tuple[Gradients, Payload]:
    """Start a graph at a stage's inputs; return anchors, and the inputs as layers are given them.

    Anchors are leaves of the inputs' shapes, without memory of their own, that get the inputs'
    gradients; None where none is needed. The graph keeps an input itself only if a layer saves it.
    What layers are given is no leaf, so that the first may work in place.
    """
    anchors = tuple(
        torch.empty((), dtype=tensor.dtype, device=tensor.device)
        .expand(tensor.shape)
        .requires_grad_()
        if needs_gradient(tensor)
        else None
        for tensor in inputs.tensors
    )
    tensors = tuple(
        tensor if anchor is None or tensor is None else _Entry.apply(anchor, tensor.detach())
        for anchor, tensor in zip(anchors, inputs.tensors, strict=True)
    )
    return anchors, replace(inputs, tensors=tensors)


def cut(outputs: Payload) -> Payload:
    """Return leaves with the outputs' memory that need a gradient where the outputs did."""
    return replace(
        outputs,
        tensors=tuple(
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in outputs.tensors
        ),
    )


def versions(payload: Payload) -> list[int]:
    """Return how often each tensor was changed in place; inference tensors are not counted."""
    return [
        -1 if tensor is None or tensor.is_inference() else tensor._version
        for tensor in payload.tensors
    ]


def total_bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

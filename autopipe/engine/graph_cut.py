"""Cut a model's graph at stage boundaries: each micro-batch has its own on each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.engine.links import Gradients, Payload

Starts = Sequence[Tensor] | Sequence[GradientEdge]
"""A loss, or edges of the graph."""

Roots = Tensor | dict[int, GradientEdge] | None
"""Where a micro-batch's backward starts: a loss, or the outputs that need a gradient, by position.

Outputs are edges of the graph, which do not keep the outputs' memory. None without a backward.
"""


def roots_of(outputs: Payload, loss: Tensor | None) -> Roots:
    """Return the loss, or without one the outputs' edges."""
    if loss is not None:
        return loss if loss.requires_grad else None
    needing = {n: tensor for n, tensor in enumerate(outputs.tensors) if needs_gradient(tensor)}
    return {n: get_gradient_edge(tensor) for n, tensor in needing.items()} or None


def needs_gradient(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.requires_grad


class _Entry(torch.autograd.Function):
    """Pass data to the layers, and its gradient to an anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def enter(inputs: Payload) -> tuple[Gradients, Payload]:
    """Start a graph at a stage's inputs.

    Returns anchors, leaves that get the inputs' gradients, None for an input without one; and the
    inputs for the layers. The graph keeps one only if a layer saves it. They are no leaves, so
    that the first layer may work in place.
    """
    # Expanded from one element, an anchor takes no memory.
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
    """Return leaves with the outputs' memory and `requires_grad`."""
    return replace(
        outputs,
        tensors=tuple(
            None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in outputs.tensors
        ),
    )


def versions(payload: Payload) -> list[int]:
    """Return how often each tensor was changed in place; -1 for inference tensors."""
    return [
        -1 if tensor is None or tensor.is_inference() else tensor._version
        for tensor in payload.tensors
    ]


def total_bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

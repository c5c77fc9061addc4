"""Make gradients that are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Exploding(torch.autograd.Function):
    """Make a gradient infinite."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf

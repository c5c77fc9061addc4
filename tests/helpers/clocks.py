"""Measure by a clock that only layers move; build the layers that move it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.skip.skip_layers import pop, skippable, stash


class Clock:
    """Tell a time that stands still unless work says how long it took."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(nn.Module):
    """Take the given seconds in the forward and in the backward, and some more the first time."""

    def __init__(
        self, clock: Clock, forward_s: float, backward_s: float = 0.0, first_s: float = 0.0
    ) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.first_s, self.num_calls = first_s, 0
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        output = input * self.scale
        if output.requires_grad:
            output.register_hook(self.spend_backward)
        self.clock.now_s += self.forward_s + (0.0 if self.num_calls else self.first_s)
        self.num_calls += 1
        return output

    def spend_backward(self, gradient: Tensor) -> None:
        self.clock.now_s += self.backward_s


class AddLeaves(nn.Module):
    """Add as many tensors that want a gradient; each is kept for it."""

    def __init__(self, num_leaves: int) -> None:
        super().__init__()
        self.num_leaves = num_leaves

    def forward(self, input: Tensor) -> Tensor:
        for _ in range(self.num_leaves):
            input = input + torch.rand_like(input, requires_grad=True)
        return input


class PlainFork(nn.Module):
    """Stash a function of the input that the output does not contain."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("branch", (input * self.weight).exp())
        return input + 1


class PlainJoin(nn.Module):
    """Work in place on the popped skip, which only a non-leaf allows, and keep it."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        branch = yield pop("branch")
        return branch.mul_(2) * input


class PlainMaybeFork(nn.Module):
    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        yield stash("branch", None)
        return input


class PlainMaybeJoin(nn.Module):
    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        branch = yield pop("branch")
        assert branch is None
        return input


Fork, Join = skippable(stash=["branch"])(PlainFork), skippable(pop=["branch"])(PlainJoin)


MaybeFork = skippable(stash=["branch"])(PlainMaybeFork)


MaybeJoin = skippable(pop=["branch"])(PlainMaybeJoin)

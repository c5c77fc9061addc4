"""Build what freezes by itself, and what a policy is shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from freeze.policy import FreezeContext, LayerStats

# The last layer's gradient is always the smallest, so that it never holds the rule back.
FALLING = [12.0 - index for index in range(12)]


def make_context(
    norms: Sequence[float | None] = FALLING, *, epoch: int = 1, num_frozen: int = 0
) -> FreezeContext:
    """Build a context of one step per epoch, in which frozen layers have no gradient norm."""
    layers = tuple(
        LayerStats(f"blocks.{i}", i, 100, None if i < num_frozen else norm)
        for i, norm in enumerate(norms)
    )
    return FreezeContext(
        step=epoch,
        epoch=epoch,
        max_steps=20,
        steps_per_epoch=1,
        learning_rate=1e-3,
        peak_learning_rate=1e-3,
        layers=layers,
        num_frozen=num_frozen,
        frozen_since=(0,) * num_frozen,
        metrics={"accuracy": 0.5},
        predict=lambda num_frozen: 1.0,
    )


class Block(nn.Module):
    """Transform with dropout and running statistics, so that modes show."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.norm(self.linear(x)))
        return out


class Net(nn.Module):
    """Stack blocks between an embedding and a head."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], after[name]) for name in before)

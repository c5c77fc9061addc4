"""Build the tiny models and data sets that tests train."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pipetransformer import LayeredModel, Sublayer, Trainer

NUM_SAMPLES = 26
NUM_CLASSES = 3
# Rows of 16 bytes or a multiple: with others, MKL computes a row differently by where it starts,
# and the cache, which moves rows within a chunk, could not be compared bit by bit.
NUM_FEATURES = 8


class Block(nn.Module):
    """A residual MLP with a norm and dropout, one layer of the tiny model."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.nn.functional.gelu(self.inner(self.norm(hidden)))
        return hidden + self.dropout(self.outer(inner))


def tiny_model(
    *, num_blocks: int = 4, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """Build an embedding, blocks and a head, the same weights on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, 8),
            *[Block(8, dropout) for _ in range(num_blocks)],
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, NUM_CLASSES)),
        )
    return model.to(dtype)


def tiny_data(
    *, num_samples: int = NUM_SAMPLES, dtype: torch.dtype = torch.float64
) -> TensorDataset:
    """Make a learnable classification problem."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=dtype)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def tiny_trainer(model: Any = None, data: Any = None, **settings: Any) -> Trainer:
    """Build a silent Trainer for classes, of the tiny model and data where no others are given."""
    return Trainer(
        tiny_model() if model is None else model,
        tiny_data() if data is None else data,
        **{"loss_fn": nn.CrossEntropyLoss(), "progress": False, **settings},
    )


def sequential() -> nn.Sequential:
    """Build five children: one is used twice, one keeps statistics of its batches."""
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Linear(5, 8),
        relu,
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
        relu,
        nn.Linear(8, 3),
    )


IGNORED = -100
"""The class of targets that a loss leaves out."""


class Mix(nn.Module):
    """Mix features where a sample's mask is 1, and scale; the attention of the deep model."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.rand(width) + 0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mixed = self.inner(self.norm(hidden) * mask * self.scale)
        return hidden + self.dropout(self.gain * mixed)


class Routed(nn.Module):
    """Send the few samples whose mask begins with 0 through an expert, which has no gradient in a
    batch without any."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.expert = Block(width, dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        chosen = mask[:, :1] == 0
        return torch.where(chosen, self.expert(hidden), hidden) if chosen.any() else hidden


NUM_DEEP_LAYERS = 7


class Deep(nn.ModuleDict):
    """Run sublayers one after the other, each with the mask if it takes one."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for module in self.values():
            x = module(x, mask) if isinstance(module, (Mix, Routed)) else module(x)
        return x


def deep_model(*, dropout: float = 0.0, fixed: Collection[str] = ()) -> LayeredModel:
    """Build 7 layers of two sublayers or three, and a head, in float64: enough for 8 stages.

    Sublayers differ in what they hold: parameters with and without dimensions, buffers, side
    inputs, an expert that few samples visit, or nothing at all.

    Args:
        dropout: of every layer.
        fixed: sublayers whose parameters the user does not train.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts: list[tuple[str, int, nn.Module]] = [("embedding", 0, nn.Linear(NUM_FEATURES, 8))]
        for layer in range(NUM_DEEP_LAYERS):
            above = Routed if layer in (2, 5) else Block
            parts.append((f"mix{layer}", layer, Mix(8, dropout)))
            parts.append((f"mlp{layer}", layer, above(8, dropout) if layer != 3 else nn.Tanh()))
        parts.append(("head", NUM_DEEP_LAYERS, nn.Linear(8, NUM_CLASSES)))
    model = Deep({name: module for name, _, module in parts}).double()
    for name in fixed:
        model[name].requires_grad_(False)
    sublayers = [
        Sublayer(name, layer, module, ("mask",) if isinstance(module, (Mix, Routed)) else ())
        for name, layer, module in parts
    ]
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))


class Entries(Dataset[dict[str, Tensor]]):
    """Serve rows of named tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int | Tensor) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def deep_data(*, num_samples: int = NUM_SAMPLES, ignored: bool = False) -> Entries:
    """Make a learnable problem with masks; a seventh of the samples visits the experts.

    Args:
        num_samples: rows.
        ignored: whether every third target is left out by the loss.
    """
    x, y = tiny_data(num_samples=num_samples).tensors
    index = torch.arange(num_samples)
    mask = (torch.arange(8) % 5 != index[:, None] % 7).double()
    y = y.masked_fill(index % 3 == 0, IGNORED) if ignored else y
    return Entries({"x": x, "mask": mask, "y": y})

"""Build the tiny models and data sets that the tests of invariants train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

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

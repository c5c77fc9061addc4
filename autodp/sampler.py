"""Yield the global batches: every dataset index once per epoch, whatever K and R are."""

from __future__ import annotations

import torch
from torch import Tensor

_POOLED_BATCHES = 50
"""Batches whose samples are sorted together, where each is to have about equal lengths."""


class EpochSampler:
    """Order an epoch's dataset indices as a pure function of (seed, epoch).

    Args:
        num_samples: of the dataset.
        seed: of the run.
        lengths: (N,) of the samples, to have those of about equal lengths in one batch; samples of
            so many batches at a time are sorted, the longest first. None leaves them in any order.
        batch_size: of a global batch.
    Source: the grouping of transformers' LengthGroupedSampler.
    """

    def __init__(
        self, num_samples: int, *, seed: int, lengths: Tensor | None = None, batch_size: int = 1
    ) -> None:
        if num_samples < 1:
            raise ValueError("the dataset is empty; give at least one sample")
        self.num_samples = num_samples
        self.seed = seed
        self._lengths, self._pool = lengths, _POOLED_BATCHES * batch_size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def global_batch(self, epoch: int, position: int, size: int) -> Tensor:
        """Return the indices of the global batch that begins at a sample of an epoch.

        They are (min(size, num_samples - position),) int64 on CPU.
        """
        if epoch != self._epoch:
            self._order, self._epoch = self._order_of(epoch), epoch
        return self._order[position : position + size].clone()

    def _order_of(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self._lengths is None:
            return order
        pools = order.split(self._pool)
        return torch.cat(
            [pool[self._lengths[pool].argsort(descending=True, stable=True)] for pool in pools]
        )


def split_evenly(num_samples: int, num_parts: int) -> tuple[int, ...]:
    """Return part sizes that differ by at most one, the larger ones first.

    A replica's slice of the global batch, and a micro-batch's of the replica's, are both cut so.
    """
    small, extra = divmod(num_samples, num_parts)
    return tuple(small + (part < extra) for part in range(num_parts))


def mix_seed(*numbers: int) -> int:
    """Mix integers into one 63-bit seed, so that nearby inputs give unrelated streams.

    Each integer, modulo 2^64, is added to the state before one splitmix64 round.
    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


_MASK = (1 << 64) - 1

"""Yield the global batches: every dataset index once per epoch, whatever K and R are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_POOLED_BATCHES, _POOLS = 50, 4
"""Most batches that are sorted together, as a pool, and fewest pools of an epoch. Large pools give
equal lengths; many pools give batches of other samples in every epoch."""


EpochOrder = Callable[[int], Tensor]
"""(epoch) -> (N,) int64: every dataset index once, in the order of that epoch."""


class EpochSampler:
    """Cut an epoch's dataset indices into global batches; every rank has the same order."""

    def __init__(self, num_samples: int, order: EpochOrder) -> None:
        if num_samples < 1:
            raise ValueError("the dataset is empty; give at least one sample")
        self.num_samples = num_samples
        self._order_of = order
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def global_batch(self, epoch: int, position: int, size: int) -> Tensor:
        """Return the global batch at a position: (min(size, num_samples - position),) int64."""
        if epoch != self._epoch:
            self._order, self._epoch = self._order_of(epoch), epoch
        return self._order[position : position + size].clone()


def checked_order(num_samples: int, order: EpochOrder) -> EpochOrder:
    """Return a user's order that raises a ValueError if it has not every index once."""

    def checked(epoch: int) -> Tensor:
        found = torch.as_tensor(order(epoch), dtype=torch.int64)
        if not torch.equal(found.sort().values, torch.arange(num_samples)):
            raise ValueError(
                f"the order of epoch {epoch} is of {len(found)} indices, not of each of "
                f"0..{num_samples - 1} once; an epoch covers every sample exactly once"
            )
        return found

    return checked


def shuffled(num_samples: int, *, seed: int) -> EpochOrder:
    """Return an order that depends on (seed, epoch) alone."""

    def order(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
        return torch.randperm(num_samples, generator=generator)

    return order


def shuffled_by_length(lengths: Tensor, *, seed: int, batch_size: int) -> EpochOrder:
    """Return an order that puts samples of about equal (N,) lengths into one global batch.

    Each pool of several batches is sorted, longest first; as transformers' LengthGroupedSampler.
    """
    shuffle = shuffled(len(lengths), seed=seed)
    pooled = max(1, min(_POOLED_BATCHES, len(lengths) // (_POOLS * batch_size)))

    def order(epoch: int) -> Tensor:
        pools = shuffle(epoch).split(pooled * batch_size)
        return torch.cat(
            [pool[lengths[pool].argsort(descending=True, stable=True)] for pool in pools]
        )

    return order


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

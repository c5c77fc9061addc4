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


def places_in_batches(num_samples: int, batch_size: int, *, unit: int = 1) -> Tensor:
    """Return (N,) int64: at which place of its batch each position of an epoch is.

    The last batch may be smaller. Its places are spread over those of the others, so that a cut
    into slices gives equal places to equal replicas.

    Args:
        unit: samples that no cut parts.
    """
    places = torch.arange(num_samples) % batch_size
    rest = num_samples % batch_size
    if rest and num_samples > batch_size:
        last, units = places[-rest:], -(-batch_size // unit)
        places[-rest:] = last // unit * units // -(-rest // unit) * unit + last % unit
    return places


def shuffled_in_place(places: Tensor, *, seed: int) -> EpochOrder:
    """Return an order in which each sample keeps the place in a batch that epoch 0 gave it.

    Epoch 0 is as `shuffled` has it. Later ones shuffle the samples of equal places. So a replica
    is given the same samples in every epoch, and one of twice as many replicas half of them.

    Args:
        places: (N,) int64 of each position of an epoch; see `places_in_batches`.
    """
    shuffle, by_place = shuffled(len(places), seed=seed), places.argsort(stable=True)
    first = shuffle(0)

    def order(epoch: int) -> Tensor:
        if epoch == 0:
            return first
        # Positions by their places, and among equal places at random.
        drawn = (places * len(places) + shuffle(epoch)).argsort()
        return torch.empty_like(first).index_copy_(0, by_place, first[drawn])

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

"""Say how a global batch is cut: into a slice for every replica, and that into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from autopipe.schedule import micro_batch_sizes


@dataclass(frozen=True)
class BatchCut:
    """Cut batches for one plan.

    Args:
        replicas: pipelines that share a batch.
        num_micro_batches: into which a replica cuts its slice, unless their size is fixed.
        micro_batch_size: fixes where a global batch is cut; replicas then take whole micro-batches
            each. None splits evenly.
    """

    replicas: int
    num_micro_batches: int
    micro_batch_size: int | None

    def slices(self, num_samples: int) -> tuple[int, ...]:
        """Return how many samples of a batch each replica takes, in order; the first has most.

        A slice of fewer replicas is made of whole slices of twice as many, so that samples stay
        on a node whatever the pipelines' length.
        """
        unit = self.micro_batch_size or 1
        units = -(-num_samples // unit)
        ends = [
            min(-(-units * n // self.replicas) * unit, num_samples)
            for n in range(self.replicas + 1)
        ]
        return tuple(end - begin for begin, end in pairwise(ends))

    def sizes(self, num_samples: int) -> tuple[int, ...]:
        """Return the sizes of a replica's micro-batches; none without samples."""
        if num_samples == 0:
            return ()
        count = min(num_samples, self.num_micro_batches)
        return micro_batch_sizes(num_samples, count, fixed_size=self.micro_batch_size)


@dataclass(frozen=True)
class Turn:
    """Say which of its stage's workers a rank is; they take micro-batches in turn."""

    number: int = 0
    count: int = 1

    def own(self, num_micro_batches: int) -> range:
        """Return the micro-batches that the rank takes."""
        return range(self.number, num_micro_batches, self.count)

    def samples(self, ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the samples of these micro-batches, in order.

        Args:
            sizes: of all micro-batches of `ids`.
        """
        if self.count == 1:
            return ids
        parts = ids.split(list(sizes))
        return torch.cat([ids[:0], *(parts[i] for i in self.own(len(parts)))])


@dataclass(frozen=True)
class RankShare:
    """Say which samples are one rank's.

    Args:
        replica: takes one slice of each batch.
        turn: the slice's micro-batches that are the rank's.
    """

    cut: BatchCut
    replica: int
    turn: Turn

    def slice_of(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the replica's slice of a batch, and where in the batch it begins."""
        # A spare's replica has the number behind the last: it takes nothing.
        sizes = (*self.cut.slices(len(ids)), 0)
        first = sum(sizes[: self.replica])
        return ids[first : first + sizes[self.replica]], first

    def rounds(self, num_samples: int, batch_size: int) -> list[Tensor]:
        """Return the replica's part of the samples 0..num_samples-1, round by round.

        All replicas have equally many rounds; the last ones may be empty.
        """
        ids, _ = self.slice_of(torch.arange(num_samples))
        size = max(1, batch_size // self.cut.replicas)
        most = self.cut.slices(num_samples)[0]
        return [ids[begin : begin + size] for begin in range(0, most, size)]

    def read_of(self, ids: Tensor) -> Tensor:
        """Return what the rank reads of a batch."""
        return self.read_of_slice(self.slice_of(ids)[0])

    def read_of_slice(self, ids: Tensor) -> Tensor:
        """Return what the rank reads of its replica's slice."""
        return self.turn.samples(ids, self.cut.sizes(len(ids)))

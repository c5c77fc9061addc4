"""Add up the ranks' vectors: by messages, or where the ranks share memory in that.

    shared memory, 2 ranks      rank 0               rank 1
    begin                       writes a             writes b            each into its own memory
    complete                    a0 <- a0 + b0        b1 <- a1 + b1       each a part of the sum
                                a1 <- b1             b0 <- a0            and the others' parts

Between the lines all ranks tell each other that they are done. Every part is added up once, by one
rank, and copied: the sums are equal bit by bit.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autodp.groups import link_device
from autodp.messages import waiting_for
from autodp.shared_memory import share_memory

_ALIGN_BYTES = 64


def sums_of(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> Sums:
    """Choose how the ranks of a group add up vectors of so many bytes together. Collective."""
    if device.type == "cpu" and (pieces := share_memory(group, num_bytes)) is not None:
        return SharedSums(group, pieces)
    return MessageSums(group, device)


def reserved_bytes(num_values: int, dtype: torch.dtype) -> int:
    """Return what a vector takes of the bytes that `sums_of` is told."""
    return -(-num_values * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


class MessageSums:
    """Send vectors as messages, while whatever comes before `complete` is computed."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._begun: list[tuple[Tensor, Tensor, dist.Work]] = []

    def empty(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a vector; every rank asks for the same ones, in the same order."""
        # Every value is written before it is sent; zeros would touch all of the memory already.
        return torch.empty(num_values, dtype=dtype, device=self._device)

    def begin(self, vector: Tensor, num_values: int | None = None) -> None:
        """Say that a vector from `empty` is written; every rank does so in the same order.

        Args:
            num_values: so many of its first values are to be added up; None for all.
        """
        vector = vector[:num_values]
        message = _on_link(vector, self._group)
        self._begun.append((vector, message, _begin_sum(message, self._group)))

    def complete(self) -> None:
        """Wait until all vectors that were begun hold the sums.

        Raises:
            PeerError: a rank is gone, or silent for longer than the group allows.
        """
        begun, self._begun = self._begun, []
        for vector, message, work in begun:
            _await(work, self._group)
            if message is not vector:
                vector.copy_(message)


class SharedSums:
    """Do as `MessageSums` in memory that all ranks see; only that they are done travels."""

    def __init__(self, group: dist.ProcessGroup, pieces: list[Tensor]) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._pieces = pieces
        self._used_bytes = 0
        self._ranks_vectors: dict[int, list[Tensor]] = {}
        self._begun: list[tuple[list[Tensor], dist.Work]] = []

    def empty(self, num_values: int, dtype: torch.dtype) -> Tensor:
        first, last = self._used_bytes, self._used_bytes + num_values * dtype.itemsize
        self._used_bytes += reserved_bytes(num_values, dtype)
        vectors = [piece[first:last].view(dtype) for piece in self._pieces]
        self._ranks_vectors[id(vectors[self._rank])] = vectors
        return vectors[self._rank]

    def begin(self, vector: Tensor, num_values: int | None = None) -> None:
        vectors = [one[:num_values] for one in self._ranks_vectors[id(vector)]]
        self._begun.append((vectors, self._tell_all()))

    def complete(self) -> None:
        begun, self._begun = self._begun, []
        vectors = []
        for of_ranks, work in begun:
            _await(work, self._group)
            vectors.append([vector.chunk(len(self._pieces)) for vector in of_ranks])
        # A short vector has fewer parts than there are ranks.
        for parts in vectors:
            if self._rank < len(parts[0]):
                own = parts[self._rank][self._rank]
                for rank, other in enumerate(parts):
                    if rank != self._rank:
                        own += other[self._rank]
        _await(self._tell_all(), self._group)
        for parts in vectors:
            for part in range(len(parts[0])):
                if part != self._rank:
                    parts[self._rank][part].copy_(parts[part][part])
        # Whoever went on could change what others still copy.
        _await(self._tell_all(), self._group)

    def _tell_all(self) -> dist.Work:
        return _begin_sum(torch.zeros(1), self._group)


Sums: TypeAlias = MessageSums | SharedSums
"""Replace vectors by their sums over the ranks of a group."""


def _begin_sum(message: Tensor, group: dist.ProcessGroup) -> dist.Work:
    with waiting_for("gradients of a stage", group):
        work = dist.all_reduce(message, group=group, async_op=True)
    assert work is not None
    return work


def _await(work: dist.Work, group: dist.ProcessGroup) -> None:
    with waiting_for("gradients of a stage", group):
        work.wait()


def _on_link(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a vector's memory, or a copy in host memory where the group moves only that."""
    place = link_device(vector.device, group)
    if place == vector.device:
        return vector
    host = torch.empty_like(vector, device=place, pin_memory=torch.cuda.is_available())
    return host.copy_(vector)

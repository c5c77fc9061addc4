"""Add up the ranks' vectors, by messages or in memory that ranks on one machine share.

    shared memory, 2 ranks      rank 0               rank 1
    begin                       writes a             writes b            each into its own memory
    complete                    a0 <- a0 + b0        b1 <- a1 + b1       each a part of the sum
                                a1 <- b1             b0 <- a0            and the others' parts

Between these lines all ranks tell each other that they are done. One rank adds each part up, and
the others copy it. So the sums are equal bit by bit.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from autodp.groups import link_device
from autodp.messages import gather_json, wait_text, waiting_for

_ALIGN_BYTES = 64
_HEADER_BYTES = 64
_TOKEN_BYTES = 16
_GRADIENTS = "gradients of a stage"


Watch: TypeAlias = Callable[[str], None]
"""Is told what a GPU's current stream was made to wait for: "rank 0 waited for ..."."""


def sums_of(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int, watch: Watch | None = None
) -> Sums:
    """Choose how a group adds up vectors of `num_bytes` together. Collective."""
    if device.type == "cpu" and (pieces := share_memory(group, num_bytes)) is not None:
        return SharedSums(group, pieces)
    return MessageSums(group, device, watch)


def reserved_bytes(num_values: int, dtype: torch.dtype) -> int:
    """Return what a vector adds to the `num_bytes` of `sums_of`."""
    return -(-num_values * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES


class MessageSums:
    """Send vectors as messages, while the backward goes on until `complete`.

    Args:
        watch: over NCCL, limits waits, which block no thread of the host; else not asked.
        what: the others' vectors, in the text of a failed wait.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch | None = None,
        *,
        what: str = _GRADIENTS,
    ) -> None:
        self._group, self._device, self._watch = group, device, watch
        self._what, self._text = what, ""
        self._begun: list[tuple[Tensor, Tensor, dist.Work]] = []

    def empty(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Return memory for a vector; every rank asks for the same vectors, in the same order."""
        # Not zeros: these would touch all of the memory now, and every value is written later.
        return torch.empty(num_values, dtype=dtype, device=self._device)

    def begin(self, vector: Tensor, num_values: int | None = None) -> None:
        """Begin to sum a vector from `empty`, or its first values; in one order on every rank."""
        vector = vector[:num_values]
        message = _on_link(vector, self._group)
        self._begun.append((vector, message, _begin_sum(message, self._group, self._what)))

    def complete(self) -> None:
        """Wait until all vectors hold the sums; a PeerError if a rank is gone or silent.

        Over NCCL the current stream waits, and the watch's owner knows when it has gone on.
        """
        begun, self._begun = self._begun, []
        for vector, message, work in begun:
            _await(work, self._group, self._what)
            if message is not vector:
                vector.copy_(message)
        if self._watch is not None and any(not message.is_cpu for _, message, _ in begun):
            self._text = self._text or wait_text(self._what, self._group)
            self._watch(self._text)


class SharedSums:
    """Do as `MessageSums` in memory that all ranks see; messages only say that a rank is done."""

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
        # A rank that went on could change its part while others still copy it.
        _await(self._tell_all(), self._group)

    def _tell_all(self) -> dist.Work:
        return _begin_sum(torch.zeros(1), self._group)


Sums: TypeAlias = MessageSums | SharedSums
"""Replace vectors by their sums over the ranks of a group."""


def _begin_sum(message: Tensor, group: dist.ProcessGroup, what: str = _GRADIENTS) -> dist.Work:
    with waiting_for(what, group):
        work = dist.all_reduce(message, group=group, async_op=True)
    assert work is not None
    return work


def _await(work: dist.Work, group: dist.ProcessGroup, what: str = _GRADIENTS) -> None:
    with waiting_for(what, group):
        work.wait()


def _on_link(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a vector's memory, or a copy in host memory where the group moves only that."""
    place = link_device(vector.device, group)
    if place == vector.device:
        return vector
    host = torch.empty_like(vector, device=place, pin_memory=torch.cuda.is_available())
    return host.copy_(vector)


def share_memory(group: dist.ProcessGroup, num_bytes: int) -> list[Tensor] | None:
    """Make (num_bytes,) uint8 for each rank of a group, seen by all ranks. Collective.

    It has no name on any disk, is aligned to 64 bytes, and is freed with its last tensor, even
    after a kill. None on all ranks if they are not on one Linux machine, or it has no room.
    """
    descriptor, token = -1, secrets.token_bytes(_TOKEN_BYTES)
    with suppress(OSError):
        descriptor = _create(token, _HEADER_BYTES + num_bytes)
    try:
        offer = None if descriptor < 0 else [os.getpid(), descriptor, token.hex()]
        offers = gather_json(offer, group=group)
        pieces: list[Tensor] = []
        if None not in offers:
            # On another machine the path leads nowhere, or to a file with another token.
            with suppress(OSError, ValueError):
                pieces = [
                    _map(f"/proc/{pid}/fd/{number}", bytes.fromhex(wanted), num_bytes)
                    for pid, number, wanted in offers
                ]
        # Also keeps this descriptor open until all ranks have mapped it.
        is_shared = all(gather_json(bool(pieces), group=group))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return pieces if is_shared else None


def _create(token: bytes, num_bytes: int) -> int:
    """Return the descriptor of memory that begins with a token, every byte of it reserved."""
    if sys.platform != "linux":
        raise OSError("only Linux has memory that a path under /proc leads to")
    descriptor = os.memfd_create("pipetransformer", os.MFD_CLOEXEC)
    try:
        # Reserved now: a write to memory that is not there would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.pwrite(descriptor, token, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(path: str, token: bytes, num_bytes: int) -> Tensor:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(descriptor, _TOKEN_BYTES, 0) != token:
            raise ValueError(f"{path} is other memory than was offered")
        mapping = mmap.mmap(descriptor, _HEADER_BYTES + num_bytes)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=_HEADER_BYTES)

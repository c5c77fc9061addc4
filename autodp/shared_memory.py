"""Give the processes of one machine memory that all of them see, without a name on any disk."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from autodp.messages import gather_json

_HEADER_BYTES = 64
_TOKEN_BYTES = 16


def share_memory(group: dist.ProcessGroup, num_bytes: int) -> list[Tensor] | None:
    """Make a piece of memory of one size for each rank of a group, seen by all. Collective.

    It is freed with the last tensor that shows it, even after a kill.

    Returns:
        (num_bytes,) uint8 on the CPU for each rank, in order, beginning at a multiple of 64 bytes;
        None on all ranks where they are not on one Linux machine, or it has no room.
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

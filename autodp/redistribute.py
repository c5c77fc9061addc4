"""Move named tensors between ranks: a pure plan first, then its execution.

A *shard* is the unit that moves (the weights of a sublayer, or its optimizer state). The plan says
which rank sends which shard to which rank; the execution sends every tensor of a shard as it is,
without packing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Shard = dict[str, Tensor]


@dataclass(frozen=True)
class Move:
    """Send one shard from a rank that holds it to one that needs it."""

    shard: str
    source: int
    destination: int


def plan_moves(before: Mapping[str, frozenset[int]], after: Mapping[str, frozenset[int]], *,
               slots_per_node: int) -> tuple[Move, ...]:
    """Plan who sends what, so that every rank in `after` holds its shards.

    The sender is the nearest holder: one on the same node where there is one. Several equally near
    holders share the work.

    Args:
        before: for each shard, the ranks that hold it now.
        after: for each shard, the ranks that must hold it.
        slots_per_node: ranks of one node.
    Raises:
        ValueError: a shard is needed that nobody holds.
    """
    moves, sent = [], dict[int, int]()
    for shard, needed in after.items():
        holders = before.get(shard, frozenset())
        for destination in sorted(needed - holders):
            if not holders:
                raise ValueError(f"no rank holds {shard!r}, which rank {destination} needs")
            source = min(holders, key=lambda rank: (
                rank // slots_per_node != destination // slots_per_node, sent.get(rank, 0), rank))
            sent[source] = sent.get(source, 0) + 1
            moves.append(Move(shard, source, destination))
    return tuple(moves)


def execute_moves(moves: Sequence[Move], read: Callable[[str], Shard], *,
                  group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Shard]:
    """Carry out this rank's share of the moves and return the shards it received.

    Args:
        moves: the same plan on every rank.
        read: gives a shard this rank holds; its tensors must not change until this returns.
        group: the world.
        device: where received tensors that were on an accelerator go.
    Returns:
        received shards by name; a tensor that was on the CPU of its sender arrives on the CPU.
    """
    if not moves or group is None:
        return {}
    rank = dist.get_rank()
    outgoing = [move for move in moves if move.source == rank]
    incoming = [move for move in moves if move.destination == rank]
    shards = {name: read(name) for name in dict.fromkeys(move.shard for move in outgoing)}
    headers = _exchange_headers(outgoing, incoming, shards, group)
    received = {move.shard: _allocate(header, device)
                for move, header in zip(incoming, headers, strict=True)}
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), move.destination, group)
                  for move in outgoing for tensor in shards[move.shard].values() if tensor.numel()]
    operations += [dist.P2POp(dist.irecv, tensor, move.source, group) for move in incoming
                   for tensor in received[move.shard].values() if tensor.numel()]
    if device.type != "cpu":
        # NCCL builds its communicator with all ranks, and some may have nothing to move.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    # One batch waits for one backend only: a moment on the GPU travels beside a step count in RAM.
    for on_cpu in (True, False):
        batch = [operation for operation in operations if operation.tensor.is_cpu == on_cpu]
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
    return received


def _exchange_headers(outgoing: Sequence[Move], incoming: Sequence[Move],
                      shards: Mapping[str, Shard], group: dist.ProcessGroup) -> list[list[Any]]:
    """Tell every receiver the names, dtypes and shapes to come, each header after its length."""
    pending = []
    for move in outgoing:
        text = json.dumps([[name, str(t.dtype).removeprefix("torch."), list(t.shape), t.is_cpu]
                           for name, t in shards[move.shard].items()]).encode()
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for part in (torch.tensor([len(text)]), message):
            pending.append((dist.isend(part, move.destination, group=group), part))
    headers = []
    for move in incoming:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, move.source, group=group)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(message, move.source, group=group)
        headers.append(json.loads(message.numpy().tobytes()))
    for work, _ in pending:
        assert work is not None
        work.wait()
    return headers


def _allocate(header: list[Any], device: torch.device) -> Shard:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype),
                              device="cpu" if on_cpu else device)
            for name, dtype, shape, on_cpu in header}

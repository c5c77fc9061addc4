"""Move named tensors between ranks: a pure plan first, then its execution.

A *shard* is the unit that moves (the weights of a sublayer, or its optimizer state). The plan says which rank
sends which shard to which rank; the execution sends every tensor of a shard as it is, without packing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    The sender is the nearest holder: one on the same node where there is one. Several equally near holders
    share the work.

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
    received = {move.shard: _allocate(header, device) for move, header in zip(incoming, headers)}
    operations = [dist.P2POp(dist.isend, tensor.contiguous(), move.destination, group)
                  for move in outgoing for tensor in shards[move.shard].values() if tensor.numel()]
    operations += [dist.P2POp(dist.irecv, tensor, move.source, group)
                   for move in incoming for tensor in received[move.shard].values() if tensor.numel()]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return received


def _exchange_headers(outgoing: Sequence[Move], incoming: Sequence[Move],
                      shards: Mapping[str, Shard], group: dist.ProcessGroup) -> list[list]:
    """Tell every receiver the names, dtypes and shapes to come, a message of fixed length before each header."""
    works, texts = [], []
    for move in outgoing:
        text = json.dumps([[name, str(t.dtype).removeprefix("torch."), list(t.shape), t.is_cpu]
                           for name, t in shards[move.shard].items()]).encode()
        texts.append((torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)))
        works += [dist.isend(part, move.destination, group=group) for part in texts[-1]]
    headers = []
    for move in incoming:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, move.source, group=group)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, move.source, group=group)
        headers.append(json.loads(text.numpy().tobytes()))
    for work in works:
        work.wait()
    return headers


def _allocate(header: list, device: torch.device) -> Shard:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype),
                              device="cpu" if on_cpu else device)
            for name, dtype, shape, on_cpu in header}

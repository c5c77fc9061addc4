"""Move what ranks hold to where it is needed next, in rounds that bound their memory.

    shards that a rank lacks -> described by their owners -> pieces -> rounds of moves

In each round a rank receives and sends, places what has arrived, and drops what is needed there no
more. Over gloo what lives on GPUs travels through host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from autodp.groups import link_device
from autodp.messages import gather_json
from autodp.moves import ROUND_BYTES, Holders, Move, check_holders, plan_moves
from autodp.pieces import Parcel, Piece, PieceTensor, Shard, cut
from autodp.waiting import waiting_for


class ShardStore(ABC):
    """Keep a rank's shards while they move."""

    @abstractmethod
    def read(self, shard: str) -> Shard:
        """Return what this rank holds of a shard: the tensors themselves, not copies."""

    @abstractmethod
    def put(self, shard: str, tensors: Shard) -> None:
        """Take over tensors of a shard that have arrived; the others come in other calls."""

    @abstractmethod
    def drop(self, shard: str, names: Sequence[str]) -> None:
        """Let go of tensors of a shard that this rank needs no more."""


def move_shards(
    before: Holders,
    after: Holders,
    store: ShardStore,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    slots_per_node: int,
) -> int:
    """Give every rank the shards that it must hold, and take from it those that it need not.

    Where no rank lacks a shard, nothing is sent and no rank waits for another. A rank needs no
    more memory than for what it held before or holds afterwards, and for one round (or the largest
    tensor, where that is larger) with copies of its tensors of a few kB.

    Args:
        before: for each shard, the ranks that hold it now; the same on every rank.
        after: for each shard, the ranks that must hold it.
        store: this rank's shards; nobody may change their tensors until this returns.
        group: the world; None where it is one process.
        device: where received tensors go that were on a GPU.
        slots_per_node: ranks of one node.
    Returns:
        bytes that this rank received.
    Raises:
        ValueError: a shard is needed that nobody holds.
        PeerError: a rank is gone, or silent for longer than the group's time limit.
    """
    check_holders(before, after)
    rank = 0 if group is None else dist.get_rank()
    lacking = [name for name, ranks in after.items() if ranks - before.get(name, frozenset())]
    for shard, ranks in before.items():
        if rank in ranks - after.get(shard, frozenset()) and shard not in lacking:
            store.drop(shard, tuple(store.read(shard)))
    if not lacking:
        return 0
    pieces = _describe(lacking, before, store, group=group)
    moves = plan_moves(
        {name: before[piece.shard] for name, piece in pieces.items()},
        {name: after[piece.shard] for name, piece in pieces.items()},
        {name: piece.num_bytes for name, piece in pieces.items()},
        slots_per_node=slots_per_node,
        round_bytes=ROUND_BYTES,
    )
    if moves and (link := link_device(device, group)).type != "cpu":
        # NCCL builds its communicator with all ranks, and some may have nothing to move.
        dist.all_reduce(torch.zeros(1, device=link), group=group)
    kept = frozenset(name for name, piece in pieces.items() if rank in after[piece.shard])
    own = [move for move in moves if rank in (move.source, move.destination)]
    sent = {move.piece for move in own if move.source == rank}
    for name, piece in pieces.items():
        if rank in before[piece.shard] and name not in kept and name not in sent:
            store.drop(piece.shard, piece.names)
    return _Journey(pieces, kept, store, group=group, device=device).run(own)


def _describe(
    shards: Sequence[str],
    before: Holders,
    store: ShardStore,
    *,
    group: dist.ProcessGroup | None,
) -> dict[str, Piece]:
    """Learn what shards consist of, each from the lowest rank that holds it, and cut them.

    Returns:
        the pieces, by names of their own; the same on every rank.
    """
    rank = dist.get_rank()
    own = {
        shard: [PieceTensor.of(name, t).to_json() for name, t in store.read(shard).items()]
        for shard in shards
        if min(before[shard]) == rank
    }
    described = {
        shard: specs for one in gather_json(own, group=group) for shard, specs in one.items()
    }
    pieces = {}
    for shard in shards:
        specs = [PieceTensor.from_json(values) for values in described[shard]]
        for piece in cut(shard, specs, most_bytes=ROUND_BYTES):
            pieces[f"{shard} from {piece.names[0]} on"] = piece
    return pieces


@final
class _Journey:
    """Carry out a rank's moves.

    Args:
        pieces: what the moves speak of.
        kept: the pieces that this rank must hold at last.
        store: this rank's shards.
        group, device: see `move_shards`.
    """

    def __init__(
        self,
        pieces: Mapping[str, Piece],
        kept: frozenset[str],
        store: ShardStore,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._pieces = pieces
        self._kept = kept
        self._store = store
        self._group = group
        self._device = device
        self._link_device = link_device(device, group)
        self._rank = dist.get_rank()
        self._to_send = Counter[str]()
        self._to_pass_on: dict[str, list[Tensor]] = {}

    def run(self, moves: Sequence[Move]) -> int:
        """Send and receive round by round; return the bytes received."""
        self._to_send.update(move.piece for move in moves if move.source == self._rank)
        for _, together in groupby(moves, key=lambda move: move.round):
            self._run_round(tuple(together))
        return sum(self._pieces[m.piece].num_bytes for m in moves if m.destination == self._rank)

    def _run_round(self, moves: Sequence[Move]) -> None:
        incoming = [move for move in moves if move.destination == self._rank]
        outgoing = [move for move in moves if move.source == self._rank]
        arriving = {
            move.piece: [
                spec.empty(self._link_device) for spec in self._pieces[move.piece].tensors
            ]
            for move in incoming
        }
        # One parcel for all receivers of a piece: what it packs is packed once.
        leaving = {move.piece: self._tensors(move.piece) for move in outgoing}
        parcels = {name: Parcel(tensors) for name, tensors in (arriving | leaving).items()}
        _exchange(
            [
                _Message(content, move, incoming=move in incoming)
                for move in moves
                for content in parcels[move.piece].messages
            ],
            self._group,
        )
        for move in incoming:
            parcels[move.piece].unpack()
            self._take_over(move.piece, arriving[move.piece])
        for move in outgoing:
            self._note_sent(move.piece)

    def _tensors(self, name: str) -> list[Tensor]:
        """Return a piece to send: what has arrived to be passed on, or this rank's own."""
        if name in self._to_pass_on:
            return self._to_pass_on[name]
        piece = self._pieces[name]
        shard = self._store.read(piece.shard)
        own = [shard[tensor] for tensor in piece.names]
        return [tensor if tensor.is_cpu else tensor.to(self._link_device) for tensor in own]

    def _take_over(self, name: str, tensors: list[Tensor]) -> None:
        if self._to_send[name]:
            # As it came: the store may have put it on another device.
            self._to_pass_on[name] = tensors
        piece = self._pieces[name]
        placed = {
            spec.name: tensor if spec.on_cpu else tensor.to(self._device)
            for spec, tensor in zip(piece.tensors, tensors, strict=True)
        }
        self._store.put(piece.shard, placed)

    def _note_sent(self, name: str) -> None:
        self._to_send[name] -= 1
        if not self._to_send[name]:
            self._to_pass_on.pop(name, None)
            if name not in self._kept:
                self._store.drop(self._pieces[name].shard, self._pieces[name].names)


@dataclass(frozen=True)
class _Message:
    """Name a message: its bytes, the move it is part of, and whether it comes in or goes out."""

    content: Tensor
    move: Move
    incoming: bool

    @property
    def peer(self) -> int:
        """Return the rank at the other end."""
        return self.move.source if self.incoming else self.move.destination


def _exchange(messages: Sequence[_Message], group: dist.ProcessGroup | None) -> None:
    """Send and receive, all at a time, and wait.

    Raises:
        PeerError: a message did not come, or was not taken.
    """
    works: list[tuple[_Message, dist.Work | None]] = []
    for message in messages:
        if message.content.is_cpu:
            start = dist.irecv if message.incoming else dist.isend
            with _waiting(message, group):
                works.append((message, start(message.content, message.peer, group=group)))
    # Only in a batch do NCCL's messages not wait for each other.
    rest = [message for message in messages if not message.content.is_cpu]
    batch = [
        dist.P2POp(dist.irecv if m.incoming else dist.isend, m.content, m.peer, group)
        for m in rest
    ]
    works += [(rest[0], work) for work in (dist.batch_isend_irecv(batch) if batch else ())]
    for message, work in works:
        if work is not None:
            with _waiting(message, group):
                work.wait()


def _waiting(message: _Message, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    move, verb = message.move, "send" if message.incoming else "take"
    what = f"to {verb} {move.piece}, round {move.round} of a transition"
    return waiting_for(what, group, source=message.peer)

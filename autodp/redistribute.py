"""Move what ranks hold to where it is needed next, in rounds that bound their memory.

    shards that a rank lacks -> described by their owners -> pieces -> rounds of moves

A *shard* is a mapping of names to tensors, such as the weights of a sublayer. A *piece* is a run
of its tensors, cut to travel in one round. A piece's tensors are laid out as messages; small ones
share a message::

    shard    | weight, 9 MB | bias | weight, 100 MB                | bias |
    pieces   | 0                   | 1                             | 2    |
    messages | weight       | bias | 64 MB       | 36 MB           | bias |

Over gloo what lives on GPUs travels through host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from autodp.groups import link_device
from autodp.messages import gather_json, waiting_for
from autodp.moves import ROUND_BYTES, Holders, Move, check_holders, plan_moves

Shard = dict[str, Tensor]

_PACKED_BYTES = 16 << 10
"""Smaller tensors share a message: 300 of 3 kB took 21 ms over gloo one by one, and 5 ms together.
Larger ones travel from and into their own memory."""


class ShardStore(ABC):
    """Keep a rank's shards while they move."""

    @abstractmethod
    def read(self, shard: str) -> Shard:
        """Return what this rank holds of a shard: the tensors themselves, not copies."""

    @abstractmethod
    def put(self, shard: str, tensors: Shard) -> None:
        """Take over some tensors of a shard that have arrived."""

    @abstractmethod
    def drop(self, shard: str, names: Sequence[str]) -> None:
        """Free tensors of a shard that this rank no longer needs."""


def move_shards(
    before: Holders,
    after: Holders,
    store: ShardStore,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    slots_per_node: int,
) -> int:
    """Give every rank the shards that it must hold, and drop those that it need not hold.

    If no rank lacks a shard, nothing is sent and no rank waits. A rank needs memory for the shards
    that it holds before or after, whichever is more. It also needs one round or the largest
    tensor, and copies of its small tensors.

    Args:
        before, after: the ranks that hold each shard now, and that must hold it; the same on
            every rank.
        store: this rank's shards; their tensors must not change until this returns.
        group: the world; None where it is one process.
        device: where received tensors go that were on a GPU.
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
    leaving = [n for n, p in pieces.items() if rank in before[p.shard] - after[p.shard]]
    return _Journey(pieces, store, group=group, device=device).run(moves, leaving)


def _describe(
    shards: Sequence[str], before: Holders, store: ShardStore, *, group: dist.ProcessGroup | None
) -> dict[str, Piece]:
    """Learn each shard's tensors from the lowest rank that holds it, and cut them into pieces."""
    described_here = {
        shard: [asdict(PieceTensor.of(name, t)) for name, t in store.read(shard).items()]
        for shard in shards
        if min(before[shard]) == dist.get_rank()
    }
    described = ChainMap(*gather_json(described_here, group=group))
    return {
        f"{shard} from {piece.tensors[0].name} on": piece
        for shard in shards
        for piece in cut(
            shard, [PieceTensor(**values) for values in described[shard]], most_bytes=ROUND_BYTES
        )
    }


@dataclass(frozen=True)
class PieceTensor:
    """Describe a tensor of a shard, in JSON's values; one not `on_cpu` lives on a GPU."""

    name: str
    dtype: str
    shape: list[int]
    on_cpu: bool

    @staticmethod
    def of(name: str, tensor: Tensor) -> PieceTensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return PieceTensor(name, dtype, list(tensor.shape), tensor.is_cpu)

    @property
    def num_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return prod(self.shape) * itemsize

    def place(self, device: torch.device) -> torch.device:
        """Return the device for its contents: the CPU or, for what lives on a GPU, `device`."""
        return torch.device("cpu") if self.on_cpu else device

    def empty(self, device: torch.device) -> Tensor:
        dtype = getattr(torch, self.dtype)
        return torch.empty(self.shape, dtype=dtype, device=self.place(device))


@dataclass(frozen=True)
class Piece:
    """Name tensors of one shard that travel together."""

    shard: str
    tensors: tuple[PieceTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def cut(shard: str, tensors: Sequence[PieceTensor], *, most_bytes: int) -> Iterator[Piece]:
    """Yield a shard's tensors, in order, in pieces of `most_bytes`, or of one larger tensor."""
    part: list[PieceTensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.num_bytes > most_bytes:
            yield Piece(shard, tuple(part))
            part, size = [], 0
        part.append(tensor)
        size += tensor.num_bytes
    if part:
        yield Piece(shard, tuple(part))


class Parcel:
    """Lay tensors out as messages of bytes to send, or to receive into contiguous tensors.

    Both ends lay out tensors of the same shapes and dtypes in the same order, so they agree on the
    messages. A wait for a message has a time limit, so a large tensor travels in slices.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        filled = [tensor.detach() for tensor in tensors if tensor.numel()]
        large = [tensor for tensor in filled if tensor.nbytes > _PACKED_BYTES]
        small = [tensor for tensor in filled if tensor.nbytes <= _PACKED_BYTES]
        # A message is in one memory: a moment on a GPU travels beside a step count in RAM.
        runs = [[t for t in small if t.is_cpu == on_cpu] for on_cpu in (True, False)]
        self._packed = [(torch.cat([_bytes_of(t) for t in run]), run) for run in runs if run]
        slices = [part for tensor in large for part in _bytes_of(tensor).split(ROUND_BYTES)]
        self.messages = [*slices, *(message for message, _ in self._packed)]

    def unpack(self) -> None:
        """Fill the small tensors from the messages that have arrived; large ones are full."""
        for message, tensors in self._packed:
            parts = message.split([tensor.nbytes for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _bytes_of(tensor).copy_(part)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return (nbytes,) uint8: a contiguous tensor's own memory, or a copy."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@final
@dataclass
class _Journey:
    """Carry out a rank's moves of pieces; see `move_shards`."""

    pieces: Mapping[str, Piece]
    store: ShardStore
    group: dist.ProcessGroup | None
    device: torch.device

    def run(self, moves: Sequence[Move], leaving: Sequence[str]) -> int:
        """Send and receive round by round, drop what was sent, return the bytes received."""
        rank = dist.get_rank()
        moves = [move for move in moves if rank in (move.source, move.destination)]
        last_sent = {move.piece: move.round for move in moves if move.source == rank}
        self._drop(name for name in leaving if name not in last_sent)
        for number, together in groupby(moves, key=lambda move: move.round):
            self._run_round(tuple(together), rank)
            self._drop(name for name in leaving if last_sent.get(name) == number)
        return sum(self.pieces[m.piece].num_bytes for m in moves if m.destination == rank)

    def _run_round(self, moves: Sequence[Move], rank: int) -> None:
        # One parcel for all receivers of a piece: its small tensors are packed once.
        tensors = {move.piece: self._lay_out(move, rank) for move in moves}
        parcels = {name: Parcel(own) for name, own in tensors.items()}
        _exchange(
            [(move, message) for move in moves for message in parcels[move.piece].messages],
            self.group,
        )
        for move in moves:
            if move.destination == rank:
                parcels[move.piece].unpack()
                piece = self.pieces[move.piece]
                arrived = zip(piece.tensors, tensors[move.piece], strict=True)
                placed = {spec.name: t.to(spec.place(self.device)) for spec, t in arrived}
                self.store.put(piece.shard, placed)

    def _lay_out(self, move: Move, rank: int) -> list[Tensor]:
        """Return a piece's tensors to send, or memory to receive them into."""
        piece, link = self.pieces[move.piece], link_device(self.device, self.group)
        if move.destination == rank:
            return [spec.empty(link) for spec in piece.tensors]
        shard = self.store.read(piece.shard)
        return [shard[spec.name].to(spec.place(link)) for spec in piece.tensors]

    def _drop(self, names: Iterable[str]) -> None:
        for piece in (self.pieces[name] for name in names):
            self.store.drop(piece.shard, [spec.name for spec in piece.tensors])


def _exchange(messages: Sequence[tuple[Move, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Send and receive the messages of a round's moves, all at a time, and wait."""
    rank = dist.get_rank()
    works: list[tuple[Move, dist.Work | None]] = []
    on_gpus: list[tuple[Move, dist.P2POp]] = []
    for move, message in messages:
        incoming = move.destination == rank
        start = dist.irecv if incoming else dist.isend
        peer = move.source if incoming else move.destination
        if message.is_cpu:
            with _waiting(move, group):
                works.append((move, start(message, peer, group=group)))
        else:
            on_gpus.append((move, dist.P2POp(start, message, peer, group)))
    if on_gpus:  # Outside a batch, NCCL's messages wait for each other.
        batch = dist.batch_isend_irecv([operation for _, operation in on_gpus])
        works += [(on_gpus[0][0], work) for work in batch]
    for move, work in works:
        if work is not None:
            with _waiting(move, group):
                work.wait()


def _waiting(move: Move, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    incoming = move.destination == dist.get_rank()
    peer, verb = (move.source, "send") if incoming else (move.destination, "take")
    what = f"to {verb} {move.piece}, round {move.round} of a transition"
    return waiting_for(what, group, source=peer)

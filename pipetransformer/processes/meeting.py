"""Let the ranks of a world find each other, and refuse on all of them a world that cannot train.

torchrun restarts processes on the dead ones' store, and nodes may count restarts differently. So
the store may hold an earlier attempt's keys, and torch's own start would connect to the dead
processes. Here every process has a word of its own that the others repeat.

    rank r   hello-r = its word, its seat                       ack-r = 7e
    rank 0                          invitation = 7e, all hellos            go = 7e

A rank answers an invitation that repeats its word. Rank 0 invites again whenever a hello changes.
It lets all go when all have answered the same invitation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

_POLL_S = 0.02


@dataclass(frozen=True)
class Seat:
    """Describe a rank's place on its node.

    Args:
        refusal: why it has no device, or "".
        only_gpu: names the only GPU that the process sees, where that decides; else "".
        word: names this process, and no restart of it.
    """

    local_rank: int
    slots: int
    host: str
    device: str = "cpu"
    refusal: str = ""
    only_gpu: str = ""
    word: str = field(default_factory=lambda: uuid.uuid4().hex)


def meet(
    store: dist.Store, rank: int, size: int, seat: Seat, *, timeout_s: float
) -> tuple[str, list[Seat]]:
    """Wait until all processes of this attempt are there. Collective.

    Returns:
        a name that no other attempt has, and all seats by rank; the same on every rank.
    Raises:
        TimeoutError: some did not join; the message names them.
    """
    store.set(f"hello-{rank}", json.dumps(asdict(seat)))
    deadline = time.monotonic() + timeout_s
    while True:
        if rank == 0:
            _host(store, size)
        name, seats = _invitation(store)
        # A slice: an earlier, smaller world's invitation may have no such rank.
        if seat in seats[rank : rank + 1]:
            store.set(f"ack-{rank}", name)
            if _said(store, "go") == name:
                return name, seats
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} on {seat.host} waited {timeout_s:g} s for "
                f"{_missing(store, size, name)}; start the launcher on every node "
                "with the same number of nodes and processes, and see what those ranks printed"
            )
        time.sleep(_POLL_S)


def _host(store: dist.Store, size: int) -> None:
    """Do rank 0's part: invite if a hello is new and none is missing; say go if all answered."""
    hellos, acks = ([f"{word}-{rank}" for rank in range(size)] for word in ("hello", "ack"))
    if not store.check(hellos):
        return
    present = [Seat(**json.loads(hello)) for hello in store.multi_get(hellos)]
    name, invited = _invitation(store)
    # An earlier attempt's invitation differs in rank 0's own word at least.
    if present != invited:
        name = uuid.uuid4().hex
        store.set("invitation", json.dumps([name, *map(asdict, present)]))
    if store.check(acks) and {*store.multi_get(acks)} == {name.encode()}:
        store.set("go", name)


def _invitation(store: dist.Store) -> tuple[str, list[Seat]]:
    name, *seats = json.loads(_said(store, "invitation") or '[""]')
    return name, [Seat(**seat) for seat in seats]


def _missing(store: dist.Store, size: int, name: str) -> str:
    """Name the ranks that did not join, as far as this rank knows."""
    silent = [other for other in range(size) if not _said(store, f"hello-{other}")]
    if not silent and name:
        silent = [other for other in range(size) if _said(store, f"ack-{other}") != name]
    return f"rank(s) {', '.join(map(str, silent or [0]))} of {size}, which did not join"


def _said(store: dist.Store, key: str) -> str:
    # `get` alone would wait for a missing key.
    return store.get(key).decode() if store.check([key]) else ""


def assign_gpus(seats: Sequence[Seat]) -> list[Seat]:
    """Return the seats, with a GPU for each process of a node whose processes see one each.

    srun and Ray start processes so. Each sees its GPU as the first and only one, and cannot tell
    by itself whether that is also the others'.

    Raises:
        ValueError: the world cannot train; the same on every rank.
    """
    slots, found = seats[0].slots, list[Seat]()
    for first in range(0, len(seats), slots):
        node = seats[first : first + slots]
        gpus = {seat.only_gpu for seat in node}
        if "" not in gpus and len(gpus) == len(node):
            node = [replace(seat, device="cuda", refusal="") for seat in node]
        found += node
    check_seats(found)
    return found


def check_seats(seats: Sequence[Seat]) -> None:
    """Raise a ValueError for a world that cannot train, the same on every rank."""
    slots = seats[0].slots
    if len({seat.slots for seat in seats}) > 1 or len(seats) % slots:
        raise ValueError(
            f"the {len(seats)} processes are not spread evenly over nodes: "
            f"{_by([f'{seat.host} starts {seat.slots}' for seat in seats])}; start as "
            "many on every node (torchrun --nproc-per-node)"
        )
    for rank, seat in enumerate(seats):
        first = seats[rank - rank % slots]
        if seat.local_rank != rank % slots or seat.host != first.host:
            raise ValueError(
                f"rank {rank} is process {seat.local_rank} of {seat.host}; with {slots} slots a "
                f"node it must be process {rank % slots} of {first.host}: number the ranks node "
                "by node, RANK = node * LOCAL_WORLD_SIZE + LOCAL_RANK, as torchrun does"
            )
    if refusals := [seat.refusal for seat in seats if seat.refusal]:
        raise ValueError(refusals[0])
    if len({seat.device for seat in seats}) > 1:
        raise ValueError(
            "nodes would train on different devices: "
            f"{_by([f'{seat.host} uses {seat.device}' for seat in seats])}; start as "
            "many processes as there are GPUs on every node, or use device='cpu'"
        )


def _by(descriptions: Sequence[str]) -> str:
    """List equal texts once, each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        ranks.setdefault(text, []).append(rank)
    return ", ".join(f"{text} (ranks {', '.join(map(str, of))})" for text, of in ranks.items())

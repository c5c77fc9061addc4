"""Let the ranks of a world find each other, and refuse on all of them a world that cannot train.

torchrun restarts processes on the store that the dead ones used, and nodes may count restarts
differently. So what is found in the store may be an earlier attempt's; torch's own start would
connect to the dead processes. Here every process has a word of its own that the others repeat.

    rank r   hello-r = its word, its place                      ack-r = 7e
    rank 0                          invitation = 7e, all hellos            go = 7e

A rank answers an invitation that repeats its word. Rank 0 invites anew whenever a hello changes,
and lets all go when all have answered the same invitation.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

_POLL_S = 0.02


@dataclass(frozen=True)
class Seat:
    """Say where a rank stands, as it tells the others before anything starts.

    Args:
        local_rank, slots: among the processes of its node.
        refusal: why it has no device; "" where it has one.
        word: names this very process.
    """

    local_rank: int
    slots: int
    host: str
    device: str = "cpu"
    refusal: str = ""
    word: str = field(default_factory=lambda: uuid.uuid4().hex)


def meet(
    store: dist.Store, rank: int, size: int, place: Seat, *, timeout_s: float
) -> tuple[str, list[Seat]]:
    """Wait until all processes of this attempt are there. Collective.

    Args:
        store: shared by all ranks, perhaps with an earlier attempt's keys.
    Returns:
        what all agreed on: a name no other attempt has, and all places by rank.
    Raises:
        TimeoutError: some did not join; the message names them.
    """
    store.set(f"hello-{rank}", json.dumps(asdict(place)))
    deadline = time.monotonic() + timeout_s
    host = _Host(store, size) if rank == 0 else None
    while True:
        if host is not None:
            host.work()
        name, *found = json.loads(_said(store, "invitation") or '[""]')
        places = [Seat(**one) for one in found]
        # It may be of an earlier world, perhaps a smaller one, which had no such rank.
        if place in places[rank : rank + 1]:
            store.set(f"ack-{rank}", name)
            if _said(store, "go") == name:
                return name, places
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank {rank} on {place.host} waited {timeout_s:g} s for "
                f"{_missing(store, size, name)}; start the launcher on every node "
                "with the same number of nodes and processes, and see what those ranks printed"
            )
        time.sleep(_POLL_S)


class _Host:
    """Do rank 0's part."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = store
        self._hellos = [f"hello-{rank}" for rank in range(size)]
        self._acks = [f"ack-{rank}" for rank in range(size)]
        self._name = ""
        self._places: list[bytes] = []

    def work(self) -> None:
        """Invite if a hello is new and none is missing; let all go once all have answered."""
        store = self._store
        if store.check(self._hellos) and (places := store.multi_get(self._hellos)) != self._places:
            self._places, self._name = places, uuid.uuid4().hex
            store.set("invitation", json.dumps([self._name, *map(json.loads, places)]))
        if store.check(self._acks) and {*store.multi_get(self._acks)} == {self._name.encode()}:
            store.set("go", self._name)


def _missing(store: dist.Store, size: int, name: str) -> str:
    """Name the ranks that did not join, as far as this one can know."""
    silent = [other for other in range(size) if not _said(store, f"hello-{other}")]
    if not silent and name:
        silent = [other for other in range(size) if _said(store, f"ack-{other}") != name]
    return f"rank(s) {', '.join(map(str, silent or [0]))} of {size}, which did not join"


def _said(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def check_seats(places: Sequence[Seat]) -> None:
    """Refuse a world that cannot train; every rank calls it with the same places, by rank."""
    slots = places[0].slots
    if len({place.slots for place in places}) > 1 or len(places) % slots:
        raise ValueError(
            f"the {len(places)} processes are not spread evenly over nodes: "
            f"{_by(places, [f'{place.host} starts {place.slots}' for place in places])}; start as "
            "many on every node (torchrun --nproc-per-node)"
        )
    for rank, place in enumerate(places):
        first = places[rank - rank % slots]
        if place.local_rank != rank % slots or place.host != first.host:
            raise ValueError(
                f"rank {rank} is process {place.local_rank} of {place.host}; with {slots} slots a "
                f"node it must be process {rank % slots} of {first.host}: number the ranks node "
                "by node, RANK = node * LOCAL_WORLD_SIZE + LOCAL_RANK, as torchrun does"
            )
    if refusals := [place.refusal for place in places if place.refusal]:
        raise ValueError(refusals[0])
    if len({place.device for place in places}) > 1:
        raise ValueError(
            "nodes would train on different devices: "
            f"{_by(places, [f'{place.host} uses {place.device}' for place in places])}; start as "
            "many processes as there are GPUs on every node, or use device='cpu'"
        )


def _by(places: Sequence[Seat], descriptions: Sequence[str]) -> str:
    """List what holds for which ranks."""
    ranks = {
        text: [r for r, own in enumerate(descriptions) if own == text]
        for text in dict.fromkeys(descriptions)
    }
    return ", ".join(f"{text} (ranks {', '.join(map(str, own))})" for text, own in ranks.items())

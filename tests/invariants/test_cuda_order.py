"""Prove that no schedule blocks for good on GPUs, whose communication streams run in order.

Each rank has a stream to compute in and, for each direction, one to communicate in. torch's NCCL
backend gives either a group one communication stream, as here where all links of a direction share
it, or each pair of ranks its own. A message passes when both of its ends are the first in their
streams, and the computing stream has come to where they were issued.

    computing   F 0 . F 1 . wait for g 0 . B 0
    forward     a 0   a 1
    backward          g 0
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from autopipe.schedule import SCHEDULES, Op, Schedule, forward_only

STEP_OF = {
    Op.RECV_ACTIVATION: ("activation", -1),
    Op.SEND_ACTIVATION: ("activation", 1),
    Op.RECV_GRADIENT: ("gradient", 1),
    Op.SEND_GRADIENT: ("gradient", -1),
}
SENDS = (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)


@dataclass(frozen=True)
class End:
    """Name one end of a message."""

    what: str
    micro_batch: int
    source: int
    destination: int
    sends: bool

    @property
    def other(self) -> End:
        return End(self.what, self.micro_batch, self.source, self.destination, not self.sends)


@dataclass
class Rank:
    """Hold what a rank's host has launched.

    Args:
        computing: None computes; an end is waited for.
        communicating: by stream, each end with the place in `computing` where it was issued.
    """

    computing: list[End | None] = field(default_factory=list)
    communicating: dict[object, deque[tuple[End, int]]] = field(default_factory=dict)
    position: int = 0


def launch_all(
    schedule: Schedule, length: int, *, num_micro_batches: int, shared: bool
) -> list[Rank]:
    """Launch a step as channels do: a wait after each receive, sends waited for K + 1 later."""
    ranks = [Rank() for _ in range(length)]
    for index, program in enumerate(schedule(length, num_micro_batches)):
        rank, pending = ranks[index], {"activation": deque[End](), "gradient": deque[End]()}
        for instruction in program:
            op = instruction.op
            if op not in STEP_OF:
                rank.computing.append(None)
                continue
            what, step = STEP_OF[op]
            peer, sends = index + step, op in SENDS
            source, destination = (index, peer) if sends else (peer, index)
            end = End(what, instruction.micro_batch, source, destination, sends)
            if sends and len(pending[what]) > length:
                rank.computing.append(pending[what].popleft())
            stream = what if shared else (what, source, destination)
            queue = rank.communicating.setdefault(stream, deque())
            queue.append((end, len(rank.computing)))
            if sends:
                pending[what].append(end)
            else:
                rank.computing.append(end)
        rank.computing += [*pending["gradient"], *pending["activation"]]
    return ranks


def run(ranks: list[Rank]) -> bool:
    """Let the devices go on until they cannot; tell whether all is done."""
    passed: set[End] = set()
    while True:
        for rank in ranks:
            ahead = rank.computing[rank.position :]
            rank.position += next(
                (i for i, end in enumerate(ahead) if end is not None and end not in passed),
                len(ahead),
            )
        ready = {
            queue[0][0]: queue
            for rank in ranks
            for queue in rank.communicating.values()
            if queue and queue[0][1] <= rank.position
        }
        meeting = [end for end in ready if end.other in ready]
        if not meeting:
            return all(rank.position == len(rank.computing) for rank in ranks)
        for end in meeting:
            ready[end].popleft()
        passed.update(meeting)


@pytest.mark.parametrize("shared", [True, False], ids=["a stream a direction", "one a link"])
@pytest.mark.parametrize("name", [*SCHEDULES, "forward only"])
def test_every_schedule_runs_to_its_end(name: str, shared: bool) -> None:
    schedule = SCHEDULES.get(name, lambda k, m: forward_only((1,) * k, m))
    for length in range(2, 7):
        for num_micro_batches in range(1, 2 * length + 2):
            ranks = launch_all(
                schedule, length, num_micro_batches=num_micro_batches, shared=shared
            )
            assert run(ranks), f"K = {length}, M = {num_micro_batches}"


def test_two_ranks_that_first_receive_from_each_other_in_one_stream_block() -> None:
    ends = [End("activation", 0, 0, 1, True), End("activation", 0, 1, 0, True)]
    ranks = [Rank([], {"one": deque([(ends[1 - r].other, 0), (ends[r], 0)])}) for r in range(2)]
    for rank in ranks:
        rank.computing = [end for end, _ in rank.communicating["one"]]
    assert not run(ranks)

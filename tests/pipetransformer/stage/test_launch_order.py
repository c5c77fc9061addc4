"""Prove that ranks never wait for each other for ever, whatever streams share a GPU's queues."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product

import pytest

from tests.helpers.launches import (
    MAIN,
    Launch,
    Members,
    Program,
    QueueOf,
    Shape,
    ended_in_order,
    record,
    stuck,
)
from tests.helpers.marks import slow

NUM_QUEUES = (8, 32)
"""What CUDA_DEVICE_MAX_CONNECTIONS is by default, and at most."""

recorded = lru_cache(maxsize=4)(record)


def one_queue(number: int, stream: str) -> int:
    return 0


def queues(seed: int) -> Iterator[QueueOf]:
    """Yield ways in which streams share queues: one has all, each its own, and some at random."""
    yield one_queue
    for num in NUM_QUEUES:
        yield lambda number, stream, num=num: number % num
        yield partial(_drawn, random.Random(seed), {}, num)


def _drawn(
    numbers: random.Random, known: dict[str, int], num: int, number: int, stream: str
) -> int:
    # Between two of ours any other streams may have been made, so theirs may be any queues.
    return known.setdefault(stream, numbers.randrange(num // 4))


def planted() -> tuple[list[Program], Members]:
    """Let a rank send three messages before it asks for what the other sends before it reads on.

    rank 0      send a0   send a1   send a2   receive g
    rank 1      receive a0   send g, and wait   receive a1   receive a2
    """
    below, above = Program(), Program()
    for _ in range(3):
        below.operate("up", "send", 1)
    below.wait_for(below.operate("down", "receive", 1))
    above.wait_for(above.operate("up", "receive", 0))
    above.wait_for(above.operate("down", "send", 0))
    for _ in range(2):
        above.wait_for(above.operate("up", "receive", 0))
    return [below, above], {"up": 2, "down": 2}


def test_a_message_that_waits_at_the_head_of_a_shared_queue_is_found() -> None:
    programs, members = planted()
    for num in NUM_QUEUES:
        assert stuck(programs, members, lambda number, stream, num=num: number % num) == []
    told = stuck(programs, members, one_queue)
    assert any("rank 0's queue at Launch(stream='up'" in one for one in told), told
    assert any(one == "operation 0 of down: only rank 1" for one in told), told


@pytest.mark.parametrize("operation", ["send", "sum"])
def test_parts_that_are_no_operation_together_never_end(operation: str) -> None:
    programs = [Program(), Program()]
    programs[0].operate("both", "send", 1)
    programs[1].operate("both", operation, 0)
    assert stuck(programs, {"both": 2}, one_queue) == []  # Nobody waits for it.
    for program in programs:
        program.launch(Launch(MAIN, (0,)))
    assert len(stuck(programs, {"both": 2}, one_queue)) == 2


@pytest.mark.parametrize("num_queues", NUM_QUEUES)
def test_one_communicator_for_both_directions_would_wait_for_ever(num_queues: int) -> None:
    programs, members = recorded(Shape(2, 1, 3, one_way=True))
    assert stuck(programs, members, lambda number, stream: number % num_queues)


def test_operations_that_end_in_the_order_of_their_launches_would_wait_for_ever() -> None:
    # As NCCL_LAUNCH_ORDER_IMPLICIT has it before CUDA 12.3; the launcher leaves it unset.
    programs, members = recorded(Shape(2, 2, 3))
    assert stuck([ended_in_order(one) for one in programs], members, lambda number, _: number)


def check(shape: Shape) -> None:
    programs, members = recorded(shape)
    operations = [
        step for one in programs for step in one.steps if getattr(step, "communicator", None)
    ]
    assert operations or len(programs) == 1, "nothing was recorded"
    for queue_of in queues(seed=shape.micro_batches):
        assert stuck(programs, members, queue_of) == []


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 2, 3),
        Shape(3, 1, 2, "gpipe"),
        Shape(2, 2, 2, samples=(1, 8)),  # The second replica begins without a sample.
        slow(Shape(2, 1, 3, samples=(6, 6, 6), versions="stashed")),
    ],
    ids=["1f1b", "gpipe", "short", "stream"],
)
def test_steps_end_however_streams_share_queues(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize("length", [slow(one) for one in range(1, 5)])
@pytest.mark.parametrize("replicas", [slow(one) for one in range(1, 5)])
def test_steps_of_all_pipelines_end(length: int, replicas: int) -> None:
    for micro_batches, schedule in product(range(1, 9), ("gpipe", "1f1b")):
        whole = 2 * micro_batches * replicas
        # The last batch of an epoch leaves some replicas with fewer micro-batches, or none.
        check(Shape(length, replicas, micro_batches, schedule, (whole, max(1, replicas - 1))))


@pytest.mark.parametrize(
    "workers", [slow((2, 1)), slow((1, 2)), slow((2, 2)), slow((3, 1)), slow((2, 1, 1))]
)
def test_steps_of_stages_with_several_workers_end(workers: tuple[int, ...]) -> None:
    for micro_batches in range(max(workers), 9):
        check(Shape(len(workers), 1, micro_batches, workers=workers))


@pytest.mark.parametrize(
    ("length", "replicas"), [slow(2, 1), slow(2, 2), slow(3, 1), slow(4, 1), slow(4, 2)]
)
def test_streams_of_steps_without_flushes_end(length: int, replicas: int) -> None:
    for micro_batches in range(length - 1, 9):
        samples = (2 * micro_batches * replicas,) * 3
        check(Shape(length, replicas, micro_batches, samples=samples, versions="stashed"))

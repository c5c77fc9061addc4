"""Prove that a stage's workers share its micro-batches, and that updates stand where they must."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from autopipe.plan.simulation import StageTimes, simulate
from autopipe.schedule import (
    Op,
    StageWorkers,
    one_f_one_b,
    peak_in_flight,
    replicated_one_f_one_b,
    unflushed,
)

SHAPES = [(1,), (3,), (2, 1), (1, 2), (3, 1, 2), (2, 2), (1, 4), (4, 1, 1, 1)]
each_shape = pytest.mark.parametrize("replicas", SHAPES)


def times(forward_s: tuple[float, ...], num_micro_batches: int, transfer_s: float) -> StageTimes:
    rows = tuple((seconds,) * num_micro_batches for seconds in forward_s)
    doubled = tuple(tuple(2 * seconds for seconds in row) for row in rows)
    return StageTimes(rows, doubled, ((transfer_s,) * num_micro_batches,) * (len(rows) - 1))


def test_workers_are_numbered_stage_by_stage_and_take_turns() -> None:
    workers = StageWorkers((3, 1, 2))
    assert workers.stages == (0, 0, 0, 1, 2, 2)
    assert workers.firsts == (0, 3, 4, 6)
    assert [workers.of(0, i) for i in range(4)] == [0, 1, 2, 0]
    assert [workers.of(2, i) for i in range(3)] == [4, 5, 4]
    assert workers.names() == [
        "stage 0.0", "stage 0.1", "stage 0.2", "stage 1", "stage 2.0", "stage 2.1",
    ]  # fmt: skip
    # floor((N - 1 - workers below) / workers), as published.
    assert [workers.warm_up(stage) for stage in range(3)] == [5 // 3, 2, 1 // 2]


@each_shape
@pytest.mark.parametrize("num_micro_batches", [4, 5, 12])
def test_each_micro_batch_has_one_worker_of_each_stage_and_no_one_waits_forever(
    replicas: tuple[int, ...], num_micro_batches: int
) -> None:
    workers, schedule = StageWorkers(replicas), replicated_one_f_one_b(replicas, num_micro_batches)
    assert len(schedule) == sum(replicas)
    done = Counter(
        (workers.stages[worker], ins.op, ins.micro_batch)
        for worker, program in enumerate(schedule)
        for ins in program
        if ins.op in (Op.FORWARD, Op.BACKWARD)
    )
    stages, kinds = range(len(replicas)), (Op.FORWARD, Op.BACKWARD)
    assert done == Counter(itertools.product(stages, kinds, range(num_micro_batches)))
    for worker, program in enumerate(schedule):
        stage = workers.stages[worker]
        assert peak_in_flight(program) <= workers.warm_up(stage) + 1
    simulate(schedule, times((1.0,) * len(replicas), num_micro_batches, 0.1), replicas=replicas)


def test_one_worker_a_stage_is_1f1b() -> None:
    assert replicated_one_f_one_b((1, 1, 1), 5) == one_f_one_b(3, 5)


def test_two_workers_for_a_stage_of_twice_the_cost_nearly_double_the_throughput() -> None:
    own = times((2.0, 1.0), 32, 0.0)
    straight = simulate(one_f_one_b(2, 32), own).step_s
    replicated = simulate(replicated_one_f_one_b((2, 1), 32), own, replicas=(2, 1))
    assert straight == 2 * 3 * 32 + 1
    assert straight / replicated.step_s >= 1.8
    assert len(replicated.busy_s) == 3


@each_shape
def test_an_update_follows_the_last_own_backward_of_each_batch(replicas: tuple[int, ...]) -> None:
    workers = StageWorkers(replicas)
    for worker, program in enumerate(replicated_one_f_one_b(replicas, 15, update_every=5)):
        stage = workers.stages[worker]
        count, number = replicas[stage], worker - workers.firsts[stage]
        backwards, since = [], []
        for ins in program:
            if ins.op is Op.BACKWARD:
                since.append(ins.micro_batch)
            if ins.op is Op.UPDATE:
                assert ins.micro_batch == since[-1]
                backwards.append(since)
                since = []
        assert backwards == [
            [i for i in range(batch, batch + 5) if i % count == number] for batch in (0, 5, 10)
        ]
        assert not since


def test_a_gradient_is_sent_before_the_update() -> None:
    ops = [ins.op for ins in unflushed(2, 1)[1]]
    assert ops[-3:] == [Op.BACKWARD, Op.SEND_GRADIENT, Op.UPDATE]


def test_without_flushes_stages_idle_only_at_the_ends() -> None:
    own = times((1.0,) * 3, 80, 0.0)
    assert simulate(unflushed(3, 10, 8), own).step_s == 3 * 80 + 3 * 2
    updated = StageTimes(own.forward_s, own.backward_s, own.transfer_s, update_s=(0.5,) * 3)
    assert simulate(unflushed(3, 10, 8), updated).step_s >= 3 * 80 + 0.5 * 10


@pytest.mark.parametrize("replicas", [(), (2, 0)])
def test_a_stage_without_workers_is_refused(replicas: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each needs one at least"):
        StageWorkers(replicas)


def test_batches_that_leave_a_worker_idle_are_refused() -> None:
    with pytest.raises(ValueError, match="4 micro-batches in batches of 2 do not give each of 3"):
        replicated_one_f_one_b((3, 1), 4, update_every=2)
    with pytest.raises(ValueError, match="5 micro-batches in batches of 2"):
        replicated_one_f_one_b((1, 1), 5, update_every=2)

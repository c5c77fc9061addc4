"""Prove on the programs alone that schedules are complete, lean and free of deadlocks."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from autopipe import schedule as module
from autopipe.plan.simulation import StageTimes, simulate
from autopipe.schedule import (
    SCHEDULES,
    Instruction,
    Op,
    Schedule,
    StageProgram,
    StageWorkers,
    draw,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_in_flight,
    replicated_one_f_one_b,
    split_at_first_backward,
    split_evenly,
    unflushed,
)

SIZES = [
    (num_stages, num_micro_batches)
    for num_stages in (1, 2, 3, 4, 8)
    for num_micro_batches in (1, 2, 3, 4, 5, 8, 17)
]


def every_schedule() -> list[tuple[str, int, int, Schedule]]:
    build = {**SCHEDULES, "forward_only": lambda k, m: forward_only((1,) * k, m)}
    return [(name, k, m, build[name](k, m)) for name in build for k, m in SIZES]


def order(program: StageProgram, op: Op) -> list[int]:
    return [ins.micro_batch for ins in program if ins.op is op]


def peak(program: StageProgram) -> int:
    steps = [{Op.FORWARD: 1, Op.BACKWARD: -1}.get(ins.op, 0) for ins in program]
    return max(itertools.accumulate(steps))


def test_drawn_schedules_are_the_grids_of_the_docstring() -> None:
    assert module.__doc__ is not None
    rows = re.findall(r"^ +(?:stage|worker) \d.*", module.__doc__, re.MULTILINE)
    lines = [line.strip() for line in rows]
    assert draw(gpipe(3, 3)).splitlines() == lines[:3]
    assert draw(one_f_one_b(3, 3)).splitlines() == lines[3:6]
    assert draw(gpipe(3, 3, recomputed=range(2))).splitlines() == lines[6:9]
    assert draw(replicated_one_f_one_b((2, 1), 4), replicas=(2, 1)).splitlines() == lines[9:12]
    assert draw(unflushed(2, 4)).splitlines() == lines[12:14]
    assert draw(interleaved(2, 4)).splitlines() == lines[14:]


def test_columns_stay_aligned_with_two_digit_micro_batches() -> None:
    first, second = draw(gpipe(2, 11)).splitlines()
    assert first.index("F10") + len("F10 ") == second.index("F10")
    assert first.index("B1 ") == second.index("B0")


def test_stages_run_every_forward_once_and_every_backward_once_after_it() -> None:
    for name, _, m, schedule in every_schedule():
        for program in schedule:
            assert len(set(program)) == len(program)
            assert order(program, Op.FORWARD) == list(range(m))
            backwards = order(program, Op.BACKWARD)
            assert sorted(backwards) == ([] if name == "forward_only" else list(range(m)))
            for i in backwards:
                assert program.index(Instruction(Op.FORWARD, i)) < program.index(
                    Instruction(Op.BACKWARD, i)
                )


def test_gpipe_runs_backwards_in_descending_order_and_1f1b_in_ascending_order() -> None:
    for k, m in SIZES:
        assert all(order(p, Op.BACKWARD) == list(range(m))[::-1] for p in gpipe(k, m))
        assert all(order(p, Op.BACKWARD) == list(range(m)) for p in one_f_one_b(k, m))


def test_gpipe_runs_no_forward_after_its_first_backward() -> None:
    for k, m in SIZES:
        for program in gpipe(k, m):
            ops = [ins.op for ins in program if ins.op in (Op.FORWARD, Op.BACKWARD)]
            assert ops == [Op.FORWARD] * m + [Op.BACKWARD] * m


def test_stage_j_keeps_k_minus_j_micro_batches_under_1f1b_and_all_under_gpipe() -> None:
    for k, m in SIZES:
        assert [peak(program) for program in one_f_one_b(k, m)] == [
            min(m, k - j) for j in range(k)
        ]
        assert [peak(program) for program in gpipe(k, m)] == [m] * k


def test_both_ends_of_every_link_issue_its_operations_in_the_same_order() -> None:
    for _, _, _, schedule in every_schedule():
        for below, above in itertools.pairwise(schedule):
            assert order(below, Op.SEND_ACTIVATION) == order(above, Op.RECV_ACTIVATION)
            assert order(above, Op.SEND_GRADIENT) == order(below, Op.RECV_GRADIENT)


def test_the_ends_of_a_pipeline_have_no_links_beyond_them() -> None:
    for _, _, _, schedule in every_schedule():
        first, last = schedule[0], schedule[-1]
        assert order(first, Op.RECV_ACTIVATION) == order(first, Op.SEND_GRADIENT) == []
        assert order(last, Op.SEND_ACTIVATION) == order(last, Op.RECV_GRADIENT) == []


def test_work_stands_between_the_receive_it_needs_and_the_send_it_feeds() -> None:
    around = {
        Op.FORWARD: (Op.RECV_ACTIVATION, Op.SEND_ACTIVATION),
        Op.BACKWARD: (Op.RECV_GRADIENT, Op.SEND_GRADIENT),
    }
    for _, k, _, schedule in every_schedule():
        for stage, program in enumerate(schedule):
            for n, instruction in enumerate(program):
                if instruction.op not in around:
                    continue
                i, (receive, send) = instruction.micro_batch, around[instruction.op]
                forward = instruction.op is Op.FORWARD
                if stage > 0 if forward else stage < k - 1:
                    assert program[n - 1] == Instruction(receive, i)
                if stage < k - 1 if forward else stage > 0:
                    assert program[n + 1] == Instruction(send, i)


@pytest.mark.parametrize("capacity", [1, 2, 100])
def test_no_schedule_blocks_on_links_that_hold_few_messages(capacity: int) -> None:
    for _, _, _, schedule in every_schedule():
        assert finishes(schedule, capacity)


def finishes(schedule: Schedule, capacity: int) -> bool:
    """Run all stages until none can go on; a full or an empty link blocks its user."""
    sent: dict[tuple[int, Op], list[int]] = {
        (j, op): [] for j in range(len(schedule)) for op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
    }
    position, moved = [0] * len(schedule), True
    while moved:
        moved = False
        for j, program in enumerate(schedule):
            while position[j] < len(program) and advance(program[position[j]], j, sent, capacity):
                position[j] += 1
                moved = True
    return position == [len(program) for program in schedule]


def advance(
    instruction: Instruction, stage: int, sent: dict[tuple[int, Op], list[int]], capacity: int
) -> bool:
    op, i = instruction.op, instruction.micro_batch
    if op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
        if len(sent[stage, op]) == capacity:
            return False
        sent[stage, op].append(i)
    elif op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
        queue = (
            sent[stage - 1, Op.SEND_ACTIVATION]
            if op is Op.RECV_ACTIVATION
            else sent[stage + 1, Op.SEND_GRADIENT]
        )
        if not queue:
            return False
        assert queue.pop(0) == i, "a message is taken for another one"
    return True


def test_both_schedules_have_the_same_bubble() -> None:
    for name, (k, m) in itertools.product(SCHEDULES, SIZES):
        rows = draw(SCHEDULES[name](k, m)).splitlines()
        assert max(len(row.split()) - 2 for row in rows) == 2 * (m + k - 1)


def test_drawing_stages_that_wait_for_each_other_is_an_error() -> None:
    forward, backward = Instruction(Op.FORWARD, 0), Instruction(Op.BACKWARD, 0)
    with pytest.raises(ValueError, match="its stages wait for each other"):
        draw(((backward, forward), (forward, backward)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_recomputation_comes_after_its_forward_and_before_the_wait_for_its_gradient(
    name: str,
) -> None:
    for k, m in SIZES:
        for recomputed in (range(m), range(m - 1), ()):
            for stage, program in enumerate(SCHEDULES[name](k, m, recomputed=recomputed)):
                assert sorted(order(program, Op.RECOMPUTE)) == list(recomputed)
                for i in recomputed:
                    at = program.index(Instruction(Op.RECOMPUTE, i))
                    assert program.index(Instruction(Op.FORWARD, i)) < at
                    following = [Instruction(Op.BACKWARD, i)]
                    if stage < k - 1:
                        following.insert(0, Instruction(Op.RECV_GRADIENT, i))
                    assert list(program[at + 1 : at + 1 + len(following)]) == following


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_its_recomputations_a_schedule_is_the_one_without_checkpointing(name: str) -> None:
    for k, m in SIZES:
        repeating = SCHEDULES[name](k, m, recomputed=range(m))
        assert tuple(
            tuple(ins for ins in program if ins.op is not Op.RECOMPUTE) for program in repeating
        ) == SCHEDULES[name](k, m)


def test_a_program_parts_into_its_forwards_and_the_rest() -> None:
    for k, m in SIZES:
        for program in gpipe(k, m, recomputed=range(m)):
            forwards, rest = split_at_first_backward(program)
            assert forwards + rest == program
            assert order(forwards, Op.FORWARD) == list(range(m))
            assert order(rest, Op.FORWARD) == order(rest, Op.SEND_ACTIVATION) == []


def test_even_parts_differ_by_at_most_one_and_the_larger_come_first() -> None:
    for num_samples, num_parts in itertools.product(range(40), range(1, 12)):
        parts = split_evenly(num_samples, num_parts)
        assert len(parts) == num_parts
        assert sum(parts) == num_samples
        assert max(parts) - min(parts) <= 1
        assert list(parts) == sorted(parts, reverse=True)


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


# Workers, chunks of each, and micro-batches.
CHUNKED = [(k, v, n * k) for k in (2, 3, 4) for v in (2, 3) for n in (1, 2, 4)]
each_chunked = pytest.mark.parametrize(("k", "v", "m"), CHUNKED)


@each_chunked
def test_interleaved_stages_run_each_chunk_of_each_micro_batch_once(
    k: int, v: int, m: int
) -> None:
    for worker, program in enumerate(interleaved(k, m, num_chunks=v)):
        assert len(set(program)) == len(program)
        for op in (Op.FORWARD, Op.BACKWARD):
            ran = [(ins.micro_batch, ins.chunk) for ins in program if ins.op is op]
            assert sorted(ran) == list(itertools.product(range(m), range(v)))
        # What a worker keeps are micro-batches of a chunk, each of a v-th of its layers.
        warm_up = 2 * (k - 1 - worker) + (v - 1) * k
        assert peak_in_flight(program) == min(m * v, warm_up + 1)


@each_chunked
def test_interleaving_divides_the_bubble_by_the_chunks(k: int, v: int, m: int) -> None:
    step_s = simulate(interleaved(k, m, num_chunks=v), times((1.0,) * k * v, m, 0.0)).step_s
    whole_s = simulate(one_f_one_b(k, m), times((float(v),) * k, m, 0.0)).step_s
    ideal_s = 3.0 * v * m
    assert whole_s / ideal_s - 1 == pytest.approx((k - 1) / m)
    assert step_s / ideal_s - 1 == pytest.approx((k - 1) / (v * m))


def test_interleaved_stages_are_linked_in_a_ring_with_two_open_ends() -> None:
    first, last = interleaved(2, 2)
    of_op = {
        op: [[ins.chunk for ins in program if ins.op is op] for program in (first, last)]
        for op in Op
    }
    assert of_op[Op.RECV_ACTIVATION] == [[1, 1], [0, 0, 1, 1]]
    assert of_op[Op.SEND_ACTIVATION] == [[0, 0, 1, 1], [0, 0]]
    assert of_op[Op.RECV_GRADIENT] == [[1, 1, 0, 0], [0, 0]]
    assert of_op[Op.SEND_GRADIENT] == [[1, 1], [1, 1, 0, 0]]


def test_micro_batches_that_are_no_multiple_of_interleaved_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="6 micro-batches are no multiple of 4 workers"):
        interleaved(4, 6)

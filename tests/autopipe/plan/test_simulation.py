"""Prove that a simulated step is its schedule's longest path, and that its parts add up."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import asdict, replace
from functools import cache

import pytest

from autopipe.plan.explanation import ExplainedPlan, StepParts, explain
from autopipe.plan.request import PlanRequest
from autopipe.plan.search import predict
from autopipe.plan.simulation import Simulation, StageTimes, simulate
from autopipe.profile.network import AllReduceCost, LinkCost
from autopipe.profile.profile import Profile, SublayerCost
from autopipe.schedule import (
    SCHEDULES,
    Instruction,
    Op,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_in_flight,
)


def uniform(
    length: int, num_micro_batches: int, *, transfer_s: float = 0.0, lead_s: tuple[float, ...] = ()
) -> StageTimes:
    """Give every forward 1 s and every backward 2 s."""
    return StageTimes(
        ((1.0,) * num_micro_batches,) * length,
        ((2.0,) * num_micro_batches,) * length,
        ((transfer_s,) * num_micro_batches,) * (length - 1),
        lead_s,
    )


def grid(simulation: Simulation) -> list[str]:
    """Draw a stage's whole seconds a row, as the module's docstring does."""
    rows = [[".."] * round(simulation.step_s) for _ in simulation.busy_s]
    for event in simulation.timeline:
        for second in range(round(event.start_s), round(event.end_s)):
            rows[event.stage][second] = f"{event.op.name[0]}{event.micro_batch}"
    return [" ".join(row) for row in rows]


def longest_path(schedule: Schedule, times: StageTimes) -> float:
    """Find a step's end by recursion over what each instruction waits for."""

    def sent(stage: int, op: Op, micro_batch: int) -> tuple[int, int]:
        """Return the worker of a stage, and the place of a send in its program."""
        chunk, worker = divmod(stage, len(schedule))
        return worker, schedule[worker].index(Instruction(op, micro_batch, chunk))

    @cache
    def finished(worker: int, number: int) -> float:
        if number < 0:
            return 0.0
        ins = schedule[worker][number]
        op, i, stage = ins.op, ins.micro_batch, ins.chunk * len(schedule) + worker
        before = finished(worker, number - 1)
        if op is Op.FORWARD:
            return before + times.forward_s[stage][i]
        if op is Op.BACKWARD:
            return before + times.backward_s[stage][i]
        if op is Op.RECV_ACTIVATION:
            return max(before, arrived(*sent(stage - 1, Op.SEND_ACTIVATION, i)))
        if op is Op.RECV_GRADIENT:
            return max(before, arrived(*sent(stage + 1, Op.SEND_GRADIENT, i)))
        return before

    @cache
    def arrived(worker: int, number: int) -> float:
        ins, program = schedule[worker][number], schedule[worker]
        earlier = [
            n for n in range(number) if (program[n].op, program[n].chunk) == (ins.op, ins.chunk)
        ]
        stage = ins.chunk * len(schedule) + worker
        boundary = stage if ins.op is Op.SEND_ACTIVATION else stage - 1
        free = arrived(worker, earlier[-1]) if earlier else 0.0
        return max(finished(worker, number), free) + times.transfer_s[boundary][ins.micro_batch]

    return max(finished(worker, len(program) - 1) for worker, program in enumerate(schedule))


def test_timeline_is_the_documented_grid() -> None:
    assert grid(simulate(one_f_one_b(2, 2), uniform(2, 2, transfer_s=1.0))) == [
        "F0 F1 .. .. .. .. B0 B0 .. B1 B1",
        ".. .. F0 B0 B0 F1 B1 B1 .. .. ..",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("length", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_uniform_stages_idle_for_the_bubble_of_the_formula(
    name: str, length: int, num_micro_batches: int
) -> None:
    result = simulate(
        SCHEDULES[name](length, num_micro_batches), uniform(length, num_micro_batches)
    )
    assert result.step_s == 3.0 * (num_micro_batches + length - 1)
    assert result.idle_s == (3.0 * (length - 1),) * length
    assert result.busy_s == (3.0 * num_micro_batches,) * length


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("seed", range(20))
def test_step_of_random_times_is_the_longest_path(name: str, seed: int) -> None:
    generator = random.Random(seed)
    length, num_micro_batches = generator.randint(1, 5), generator.randint(1, 7)
    times = random_times(generator, length, num_micro_batches)
    schedule = SCHEDULES[name](length, num_micro_batches)
    assert simulate(schedule, times).step_s == pytest.approx(longest_path(schedule, times))


@pytest.mark.parametrize("seed", range(20))
def test_interleaved_step_of_random_times_is_the_longest_path(seed: int) -> None:
    generator = random.Random(seed)
    workers, chunks, rounds = (generator.randint(2, 3) for _ in range(3))
    times = random_times(generator, workers * chunks, rounds * workers)
    schedule = interleaved(workers, rounds * workers, num_chunks=chunks)
    result = simulate(schedule, times)
    assert result.step_s == pytest.approx(longest_path(schedule, times))
    of_stage = [sum(times.forward_s[j] + times.backward_s[j]) for j in range(workers * chunks)]
    assert result.busy_s == pytest.approx([sum(of_stage[j::workers]) for j in range(workers)])


def random_times(generator: random.Random, num_stages: int, num_micro_batches: int) -> StageTimes:
    return StageTimes(
        *(
            tuple(tuple(generator.random() for _ in range(num_micro_batches)) for _ in range(rows))
            for rows in (num_stages, num_stages, num_stages - 1)
        )
    )


def test_1f1b_keeps_one_micro_batch_less_on_each_later_stage() -> None:
    assert tuple(map(peak_in_flight, one_f_one_b(4, 8))) == (4, 3, 2, 1)


def test_gpipe_keeps_all_micro_batches_on_every_stage() -> None:
    assert tuple(map(peak_in_flight, gpipe(4, 8))) == (8, 8, 8, 8)


def test_link_carries_one_message_at_a_time_while_its_sender_computes_on() -> None:
    result = simulate(gpipe(2, 3), uniform(2, 3, transfer_s=5.0))
    starts_s = [event.start_s for event in result.timeline if event.op is Op.FORWARD]
    # Sent after 1, 2 and 3 s, delivered after 6, 11 and 16 s.
    assert starts_s == [0.0, 1.0, 2.0, 6.0, 11.0, 16.0]


def test_work_before_the_first_instruction_delays_the_stage_and_counts_as_busy() -> None:
    result = simulate(gpipe(2, 1), uniform(2, 1, lead_s=(4.0, 0.0)))
    assert (result.step_s, result.busy_s, result.idle_s) == (10.0, (7.0, 3.0), (3.0, 7.0))


def test_a_worker_of_interleaved_stages_leads_in_each_of_its_chunks() -> None:
    result = simulate(interleaved(2, 2), uniform(4, 2, lead_s=(1.0, 2.0, 3.0, 4.0)))
    # Two micro-batches in two chunks take 3 s each.
    assert result.busy_s == (12.0 + 1.0 + 3.0, 12.0 + 2.0 + 4.0)


def test_stages_that_wait_for_each_other_are_named() -> None:
    wait_first = (
        (
            Instruction(Op.RECV_GRADIENT, 0),
            Instruction(Op.FORWARD, 0),
            Instruction(Op.SEND_ACTIVATION, 0),
        ),
        (Instruction(Op.RECV_ACTIVATION, 0), Instruction(Op.SEND_GRADIENT, 0)),
    )
    with pytest.raises(
        ValueError, match="stage 0 waits for recv_gradient 0, stage 1 waits for recv_activation 0"
    ):
        simulate(wait_first, uniform(2, 1))


def test_messages_expected_in_another_order_than_sent_are_refused() -> None:
    sends = tuple(Instruction(Op.SEND_ACTIVATION, i) for i in (0, 1))
    receives = tuple(Instruction(Op.RECV_ACTIVATION, i) for i in (1, 0))
    with pytest.raises(ValueError, match="stage 1 waits for recv_activation 1"):
        simulate((sends, receives), uniform(2, 2))


def test_message_that_nobody_receives_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 0 between 0 and 1 is never received"):
        simulate(((Instruction(Op.SEND_ACTIVATION, 0),), ()), uniform(2, 1))


def test_times_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 3, 2, 2, 1\) rows; a schedule of 2 stages"):
        simulate(gpipe(2, 1), uniform(3, 1))


def test_handling_a_message_takes_both_ends_their_own_time() -> None:
    times = dataclasses.replace(uniform(2, 1, transfer_s=1.0), handling_s=(0.5,))
    result = simulate(one_f_one_b(2, 1), times)
    # F, hand over, 1 s on the way, take, F and B, hand over, 1 s, take, B.
    assert result.step_s == 1 + 0.5 + 1 + 0.5 + 3 + 0.5 + 1 + 0.5 + 2
    assert result.busy_s == (3 + 2 * 0.5,) * 2


def test_handling_times_are_one_a_boundary() -> None:
    times = dataclasses.replace(uniform(3, 1), handling_s=(0.5,))
    with pytest.raises(ValueError, match=r"\(3, 3, 3, 2, 1\) rows; .* one a boundary for"):
        simulate(one_f_one_b(3, 1), times)


@pytest.mark.parametrize(
    ("length", "num_micro_batches", "company"),
    [
        (1, 4, 1.0),
        (2, 1, 1.0),
        (4, 1, 1.0),
        # Forwards of 1 s alone: one stage is at work in the first and the last of 5 s, else two.
        (2, 4, (2 * 1 + 3 * 4) / (2 * 1 + 3 * 2)),
    ],
)
def test_company_is_how_many_stages_compute_while_one_does(
    length: int, num_micro_batches: int, company: float
) -> None:
    times = StageTimes(
        ((1.0,) * num_micro_batches,) * length,
        ((0.0,) * num_micro_batches,) * length,
        ((0.0,) * num_micro_batches,) * (length - 1),
    )
    result = simulate(gpipe(length, num_micro_batches), times)
    assert result.company == pytest.approx(company)


def sublayer(layer: int, forward_s: float) -> SublayerCost:
    """Cost twice its forward backward; 100 bytes of parameters, as many of gradients."""
    return SublayerCost(
        f"layer{layer}", layer, (forward_s,), (forward_s,), (forward_s,), (forward_s,),
        parameter_bytes=100, gradient_bytes=100, optimizer_bytes=200, buffer_bytes=0,
        saved_bytes=0.0, output_bytes=10.0,
    )  # fmt: skip


PROFILE = Profile(
    batch_sizes=(1,),
    sublayers=(sublayer(0, 1.0), sublayer(1, 3.0)),
    read_s=0.0,
    optimizer_s_per_byte=0.02,
    step_overhead_s=0.25,
    link=LinkCost(0.5, 100.0),
    node_link=LinkCost(9.0, 1.0),
    all_reduce=(AllReduceCost(2, (50, 150), (4.0, 6.0)),),
)


def explained() -> ExplainedPlan:
    """Explain two uneven stages of two replicas, which pass one micro-batch to each other."""
    request = PlanRequest(4, 4, global_batch=2, num_frozen=0)
    plan = predict(PROFILE, request, boundaries=(0, 1, 2), num_micro_batches=1, schedule="gpipe")
    return explain(PROFILE, request, plan)


def test_parts_of_two_uneven_stages_are_those_by_hand() -> None:
    # Stage 0 works 3 s, stage 1 works 9 s, never both at once; a message takes 0.5 + 10 / 100 s
    # each way; then 100 bytes are summed and updated.
    found = explained()
    by_hand = StepParts(
        compute_s=6.0, bubble_s=6.0, transfer_s=1.2, all_reduce_s=5.0, update_s=2.0,
        overhead_s=0.25,
    )  # fmt: skip
    for name, expected in vars(by_hand).items():
        # Parts are differences of sums, which round.
        assert getattr(found.parts, name) == pytest.approx(expected, abs=1e-12), name
    assert found.plan.predicted_step_s == pytest.approx(sum(asdict(by_hand).values()))
    assert found.simulation.busy_s == (3.0, 9.0)


def test_spans_are_the_simulated_schedule_with_each_stage_s_bytes() -> None:
    found = explained()
    spans = [(s.stage, s.op, s.start_s, s.end_s, s.peak_bytes) for s in found.spans()]
    first, second = found.plan.peak_bytes
    assert spans == [
        (0, Op.FORWARD, 0.0, 1.0, first),
        (1, Op.FORWARD, 1.6, 4.6, second),
        (1, Op.BACKWARD, 4.6, 10.6, second),
        (0, Op.BACKWARD, 11.2, 13.2, first),
    ]


def test_json_has_the_plan_its_parts_and_its_stages_times() -> None:
    found = explained()
    values = found.to_json()
    assert {k: values[k] for k in found.plan.to_json()} == found.plan.to_json()
    assert values["busy_s"] == (3.0, 9.0)
    assert values["idle_s"] == pytest.approx((10.2, 4.2))
    assert replace(found.parts, **{k: values[k] for k in vars(found.parts)}) == found.parts


@pytest.mark.parametrize("num_micro_batches", [1, 2, 16, 32])
def test_no_part_is_negative_where_messages_cost_their_ends_and_neighbours_slow_each_other(
    num_micro_batches: int,
) -> None:
    profile = replace(
        PROFILE,
        sublayers=(sublayer(0, 0.01), sublayer(1, 0.01)),
        optimizer_s_per_byte=0.0,
        step_overhead_s=0.0,
        link=LinkCost(0.0001, 1e6, overhead_s=0.002),
        idle_node_share=0.8,
    )
    request = PlanRequest(2, 2, global_batch=32, num_frozen=0)
    plan = predict(
        profile,
        request,
        boundaries=(0, 1, 2),
        num_micro_batches=num_micro_batches,
        schedule="1f1b",
    )
    parts = explain(profile, request, plan).parts
    assert min(vars(parts).values()) > -1e-12, parts
    assert sum(asdict(parts).values()) == pytest.approx(plan.predicted_step_s)


def test_what_stage_0_waits_for_rows_is_a_part_of_its_own() -> None:
    def parts(read_s: float) -> StepParts:
        request = PlanRequest(
            2, 2, global_batch=2, num_frozen=1, prefix_cached_s=read_s, prefix_read_ahead=True
        )
        plan = predict(PROFILE, request, boundaries=(1, 2), num_micro_batches=1, schedule="gpipe")
        explained = explain(PROFILE, request, plan)
        assert sum(asdict(explained.parts).values()) == pytest.approx(plan.predicted_step_s)
        assert explained.plan == plan
        return explained.parts

    # Each of two replicas trains for 9 s, sums for 5 s and updates for 2 s, with 0.25 s beside.
    hidden, shown = parts(16.0), parts(17.0)
    assert hidden.reading_s == 0.0
    assert shown == replace(hidden, reading_s=pytest.approx(0.75))

"""Prove that a step's parts are those that can be added up by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from autopipe.plan.explanation import ExplainedPlan, StepParts, explain
from autopipe.plan.request import PlanRequest
from autopipe.plan.search import predict
from autopipe.profile.network import AllReduceCost, LinkCost
from autopipe.profile.profile import Profile, SublayerCost
from autopipe.schedule import Op


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

"""Prove that the published rules give the published pipelines, and say where they cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopipe.plan.paper_rules import (
    best_first,
    plan_as_published,
    published_split,
    throughput_table,
)
from autopipe.plan.request import PlanRequest
from autopipe.profile.profile import Profile, SublayerCost
from tests.helpers.costs import FREE, sums
from tests.helpers.plain_scenario import plain
from tests.helpers.scenario import Scenario, Shape, assert_equal, merge, train

WIDTH = 768
ATTENTION, MLP = 4 * WIDTH**2 + 6 * WIDTH, 8 * WIDTH**2 + 7 * WIDTH


def profile(*sizes: tuple[int, int], second_s: float = 1e-6) -> Profile:
    """Cost every (layer, parameters) 1 s forward and 2 s backward a million parameters."""
    sublayers = tuple(
        SublayerCost(
            f"sublayer {index}",
            layer,
            *((second_s * number,),) * 4,
            parameter_bytes=4 * number,
            gradient_bytes=4 * number,
            optimizer_bytes=8 * number,
            buffer_bytes=0,
            saved_bytes=100.0,
            output_bytes=0.0,
        )
        for index, (layer, number) in enumerate(sizes)
    )
    return Profile((1,), sublayers, 0.0, 0.0, 0.0, FREE, FREE, sums())


def vit_base() -> Profile:
    """Describe ViT-B/16 with 100 classes: embedding, 24 sublayers, norm, head."""
    blocks = [(layer, size) for layer in range(12) for size in (ATTENTION, MLP)]
    embedding = 3 * 16**2 * WIDTH + 197 * WIDTH + 2 * WIDTH
    return profile((0, embedding), *blocks, (12, 2 * WIDTH), (12, 101 * WIDTH))


def request(num_frozen: int = 0, **changes: Any) -> PlanRequest:
    """Ask for 2 nodes x 8 slots and 400 samples a pipeline at the start."""
    wanted = {"num_ranks": 16, "slots_per_node": 8, "global_batch": 800, **changes}
    return PlanRequest(num_frozen=num_frozen, **wanted)


# Legend: alpha = 1/3 freezes 0 4 7 9 10 11 11 12 layers from epoch to epoch, alpha = 1/2
# 0 6 9 11 12. With lambda = 0, as Algorithm 1 is printed, K is the published one.
@pytest.mark.parametrize(
    ("frozen", "frozen_cost", "lengths"),
    [
        ((0, 4, 7, 9, 10, 11, 11, 12), 0.0, [8, 8, 4, 2, 2, 1, 1, 1]),
        ((0, 6, 9, 11, 12), 0.0, [8, 4, 2, 1, 1]),
        ((0, 4, 7, 9, 10, 11, 11, 12), 1 / 6, [8, 8, 4, 4, 4, 2, 2, 2]),
    ],
)
def test_vit_base_is_compressed_as_published(
    frozen: tuple[int, ...], frozen_cost: float, lengths: list[int]
) -> None:
    plans = [
        plan_as_published(vit_base(), request(now), frozen_cost=frozen_cost) for now in frozen
    ]
    assert [plan.length for plan in plans] == lengths
    assert {plan.schedule for plan in plans} == {"gpipe"}


def test_a_largest_partition_equal_to_the_first_one_compresses() -> None:
    # Two layers of 14.18 M parameters are the largest part at T = 0, and with 7 frozen layers on
    # 4 devices again: `<=` takes K = 4, the printed `<` would keep 8.
    assert published_split(vit_base(), 7, 4)[1:] == (16, 18, 22, 27)
    assert plan_as_published(vit_base(), request(7)).length == 4


def test_frozen_parameters_count_a_sixth_on_the_first_partition() -> None:
    # Of 12 layers of a million 6 are frozen: they weigh a million, so the first of three parts
    # with a mean of 7 / 3 takes one layer, where without them it takes two.
    layers = profile(*((layer, 1_000_000) for layer in range(12)))
    assert published_split(layers, 6, 3, frozen_cost=0.0) == (6, 7, 9, 12)
    assert published_split(layers, 6, 3, frozen_cost=1 / 6)[1] - 6 == 1
    assert (
        published_split(layers, 6, 2, frozen_cost=0.0)[1]
        > published_split(layers, 6, 2, frozen_cost=1 / 6)[1]
    )


def test_the_balance_of_vit_base_is_the_published_one() -> None:
    assert published_split(vit_base(), 0, 8) == (0, 4, 6, 9, 12, 15, 18, 22, 27)


@pytest.mark.parametrize("sizes", [(9, 1, 1, 1), (1, 1, 1, 9), (1, 9, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_every_stage_has_a_sublayer(sizes: tuple[int, ...], length: int) -> None:
    cuts = published_split(profile(*enumerate(size * 1_000_000 for size in sizes)), 0, length)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, 4, length + 1)
    assert all(low < high for low, high in zip(cuts, cuts[1:], strict=False))


def test_more_stages_than_active_sublayers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 active sublayers cannot fill 4 stages; choose from "):
        published_split(profile(*((layer, 1) for layer in range(4))), 1, 4)


def test_the_table_has_the_multiples_of_k_and_the_plan_its_best() -> None:
    table = throughput_table(vit_base(), request(), 8)
    assert list(table) == [8, 16, 24, 32, 40, 48]
    assert best_first(table)[0] == 48 == plan_as_published(vit_base(), request()).num_micro_batches


def test_throughput_is_the_bubble_formula_s_for_equal_stages() -> None:
    layers = profile(*((layer, 1_000_000) for layer in range(4)))
    asked = request(num_ranks=4, slots_per_node=4, global_batch=240)
    # 3 s a sample and stage, in M micro-batches and 3 more slots; every M divides 240.
    for count, rate in throughput_table(layers, asked, 4).items():
        assert rate == pytest.approx(count / (count + 3) / 3.0)


def test_the_table_is_that_of_the_start_whatever_is_frozen() -> None:
    start = throughput_table(vit_base(), request(), 4)
    assert throughput_table(vit_base(), request(9, prefix_cached_s=1e-3), 4) == start


def test_a_costly_micro_batch_makes_the_table_peak_and_the_plan_follows() -> None:
    layers = profile(*((layer, 1_000_000) for layer in range(4)))
    times = dict.fromkeys(
        ("forward_s", "input_backward_s", "weight_backward_s", "frozen_s"), (1.0, 1.5)
    )
    fixed = dataclasses.replace(
        layers,
        batch_sizes=(1, 48),
        sublayers=tuple(dataclasses.replace(cost, **times) for cost in layers.sublayers),
    )
    asked = request(num_ranks=4, slots_per_node=4, global_batch=48)
    table = throughput_table(fixed, asked, 4)
    assert plan_as_published(fixed, asked).num_micro_batches == best_first(table)[0] == 4
    assert sorted(table.values(), reverse=True) == list(table.values())


def test_equal_throughputs_take_the_fewest_micro_batches() -> None:
    # One stage takes the same time for every M, but for how the sums round.
    asked = request(num_ranks=1, slots_per_node=1, global_batch=400)
    assert len(set(throughput_table(vit_base(), asked, 1).values())) > 1
    assert plan_as_published(vit_base(), asked).num_micro_batches == 1


def test_fewer_samples_than_stages_are_one_micro_batch_each() -> None:
    assert list(throughput_table(vit_base(), request(global_batch=6), 8)) == [3]
    assert list(throughput_table(vit_base(), request(micro_batches=(5,)), 8)) == [5]


def test_the_best_count_that_fits_the_memory_is_taken() -> None:
    # GPipe keeps a pipeline's samples whatever M is; uneven micro-batches round them up.
    free = plan_as_published(vit_base(), request())
    limit = max(free.peak_bytes) - 1
    with pytest.raises(
        ValueError,
        match=(
            rf"published rules give 8 stages, which need \d+ bytes .*= {limit // 2}; .*"
            r'plan="fastest" or raise the limit'
        ),
    ):
        plan_as_published(vit_base(), request(memory_limit_bytes=limit // 2))
    assert plan_as_published(vit_base(), request(memory_limit_bytes=limit + 1)) == free


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedules": ("1f1b",)}, r"train with 'gpipe', but schedules is \('1f1b',\)"),
        ({"lengths": (16,)}, r"within the 8 slots of a node.*lengths = \(16,\) allow none"),
        ({"num_frozen": 12, "lengths": (4, 8)}, r"2 active sublayers cannot fill any of \[8, 4\]"),
    ],
)
def test_what_the_rules_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_as_published(vit_base(), request(**changes))


def test_a_length_that_was_set_is_kept() -> None:
    assert [
        plan_as_published(vit_base(), request(now, lengths=(4,))).length for now in (0, 9)
    ] == [4, 4]


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.slow
def test_processes_plan_as_published_and_train_as_a_plain_loop_does(
    request: pytest.FixtureRequest, ranks: str
) -> None:
    scenario = Scenario({0: Shape(1, 1)}, frozen=(0, 2, 4), settings={"plan": "published"})
    outcome = merge(request.getfixturevalue(ranks).run(train, scenario))
    assert [entry["length"] for entry in outcome.extra["transitions"]][-1] == 1
    assert_equal(outcome, plain(scenario))

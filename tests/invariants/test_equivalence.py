"""Prove the invariants: the elastic run is the run without elasticity, parameter by parameter.

Equality is in float64, where a difference of more than rounding shows; the reference is a
hand-written loop.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.forced import check, train_watched
from tests.helpers.marks import slow
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Deep,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    merge,
    train,
)

# GROW_AND_SHRINK has those that are slow, or one like them.
SHAPES = [
    slow(Shape(1, 1)),
    slow(Shape(1, 3)),
    slow(Shape(2, 1)),
    slow(Shape(2, 3)),
    Shape(2, 3, "gpipe"),
]


GROW_AND_SHRINK = {
    0: Shape(2, 3),
    3: Shape(1, 2),
    6: Shape(2, 2, "gpipe"),
    9: Shape(1, 1),
    12: Shape(2, 1),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_processes_train_as_a_plain_loop_does(two_ranks: Pool, shape: Shape) -> None:
    scenario = Scenario({0: shape})
    assert_equal(merge(two_ranks.run(train, scenario)), plain(scenario))


@pytest.mark.parametrize(
    "shape", [Shape(4, 4), Shape(2, 2), Shape(1, 2), Shape(4, 3, "gpipe")], ids=str
)
@pytest.mark.slow
def test_four_processes_train_as_a_plain_loop_does(four_ranks: Pool, shape: Shape) -> None:
    scenario = Scenario({0: shape})
    assert_equal(merge(four_ranks.run(train, scenario)), plain(scenario))


def test_changing_k_and_r_changes_nothing_on_two_processes(two_ranks: Pool) -> None:
    scenario = Scenario(GROW_AND_SHRINK)
    outcome = merge(two_ranks.run(train, scenario))
    assert [entry["length"] for entry in outcome.extra["transitions"]] == [1, 2, 1, 2]
    assert_equal(outcome, plain(scenario))


def test_changing_k_and_r_changes_nothing_on_four_processes(four_ranks: Pool) -> None:
    scenario = Scenario(
        {0: Shape(4, 4), 2: Shape(2, 3), 5: Shape(4, 2), 8: Shape(1, 2), 11: Shape(2, 1)}
    )  # The two samples of step 9 leave two of four replicas without any.
    assert_equal(merge(four_ranks.run(train, scenario)), plain(scenario))


def test_freezing_while_repacking_equals_freezing_in_a_plain_loop(two_ranks: Pool) -> None:
    scenario = Scenario(
        {0: Shape(2, 3), 5: Shape(2, 2), 7: Shape(1, 2)},
        frozen=(0, 2, 3, 3),
        settings={"epochs": 4},
    )
    outcome = merge(two_ranks.run(train, scenario))
    assert outcome.extra["hits"] > 0
    assert_equal(outcome, plain(scenario))


def test_freezing_on_four_processes_equals_freezing_in_a_plain_loop(four_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(4, 2), 5: Shape(2, 2), 10: Shape(1, 1)}, frozen=(0, 1, 4))
    assert_equal(merge(four_ranks.run(train, scenario)), plain(scenario))


def test_a_thaw_continues_with_the_moments_from_before_the_freeze(two_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(2, 2), 5: Shape(1, 2), 10: Shape(2, 1)}, frozen=(0, 3, 1))
    assert_equal(merge(two_ranks.run(train, scenario)), plain(scenario))


@pytest.mark.parametrize("shape", [slow(Shape(1, 2)), Shape(2, 3)], ids=str)
def test_cached_equals_uncached_bit_by_bit(two_ranks: Pool, shape: Shape) -> None:
    cached = Scenario(
        {0: shape}, frozen=(0, 2, 3), dtype="float32", settings={"prefix_chunk": 4, "epochs": 4}
    )
    uncached = dataclasses.replace(cached, settings={**cached.settings, "cache": False})
    with_cache, without = (merge(two_ranks.run(train, s)) for s in (cached, uncached))
    assert with_cache.extra["hits"] > 0 and without.extra["hits"] == 0
    assert_same_bits(with_cache, without)


@pytest.mark.parametrize("shape", [slow(Shape(1, 2)), Shape(2, 3)], ids=str)
def test_replicas_are_equal_bit_by_bit_after_every_step(four_ranks: Pool, shape: Shape) -> None:
    scenario = Scenario({0: shape}, frozen=(0, 1), dtype="float32")
    ranks = four_ranks.run(train_watched, scenario)
    for held in zip(*(rank.extra["digests"] for rank in ranks), strict=True):
        for rank, digests in enumerate(held):
            assert digests and digests == held[rank % shape.length]


def test_dropout_depends_neither_on_the_run_nor_on_the_cut(two_ranks: Pool) -> None:
    one, two = (Scenario({0: shape}, dropout=0.3) for shape in (Shape(1, 1), Shape(2, 2)))
    first, again, cut = (merge(two_ranks.run(train, s)) for s in (one, one, two))
    assert_same_bits(first, again)
    # R = 2 replicas of one micro-batch and one pipeline of two have the same micro-batches.
    assert_equal(first, cut)


@pytest.mark.parametrize("size", [slow(2), 4])
def test_a_fixed_micro_batch_size_makes_dropout_the_same_for_any_k_and_r(
    two_ranks: Pool, size: int
) -> None:
    # 6 samples are 3 micro-batches of 2, or one of 4 and one of 2; of 26 the last step has 2.
    count = -(-6 // size)
    settings = {"micro_batch_size": size}
    pipeline, replicas = Shape(2, count), Shape(1, -(-count // 2))
    alone, both = (
        Scenario(shapes, frozen=(0, 1), dropout=0.3, settings=settings)
        for shapes in ({0: pipeline}, {0: pipeline, 4: replicas})
    )
    assert_equal(*(merge(two_ranks.run(train, one)) for one in (alone, both)))


@pytest.mark.slow
def test_a_fixed_micro_batch_size_holds_on_four_processes(four_ranks: Pool) -> None:
    settings = {"micro_batch_size": 1}
    deep, mixed, wide = (
        Scenario({0: shape}, frozen=(0, 1, 2), dropout=0.3, settings=settings)
        for shape in (Shape(4, 6), Shape(2, 3), Shape(1, 2))
    )
    first = merge(four_ranks.run(train, deep))
    for other in (mixed, wide):
        assert_equal(first, merge(four_ranks.run(train, other)))


@pytest.mark.slow
def test_float32_losses_agree_to_a_ten_thousandth(two_ranks: Pool) -> None:
    scenario = Scenario(GROW_AND_SHRINK, frozen=(0, 1, 2), dtype="float32")
    assert merge(two_ranks.run(train, scenario)).losses == pytest.approx(
        plain(scenario).losses, abs=1e-4
    )


def test_a_stage_may_need_a_gradient_in_some_micro_batches_only(two_ranks: Pool) -> None:
    # All that stage 0 trains is an expert: the output of a micro-batch that visits it needs a
    # gradient, that of another none. The sender raised, and the receiver waited for its time.
    scenario = Scenario(
        {0: Shape(2, 3, cuts=(7,))},
        {0: 2},
        settings={"epochs": 1, "step_timeout_s": 5.0},
        deep=Deep(fixed=("mix2",)),
    )
    check(two_ranks, scenario)

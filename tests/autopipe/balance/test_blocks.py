"""Prove that block partitions keep Barany and Grinberg's guarantee, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.balance.balance import block_partition
from autopipe.partition import greedy_partition
from tests.autopipe.test_partition import exact_split, part_sums, vit_base_sizes

# Small integers make ties and zeros; floats of very different sizes make sums that round.
small_costs = st.lists(st.integers(0, 9), min_size=1, max_size=9)
any_costs = st.lists(
    st.integers(0, 9).map(float) | st.floats(0, 1e9) | st.floats(0, 1e-300),
    min_size=1,
    max_size=40,
)


def exact_sums(costs: Sequence[float], split: tuple[int, ...]) -> list[Fraction]:
    return [sum(map(Fraction, costs[first:last]), Fraction(0)) for first, last in pairwise(split)]


@settings(deadline=None, database=None)
@given(costs=any_costs, data=st.data())
def test_no_part_is_empty_and_their_sums_differ_by_at_most_the_largest_cost(
    costs: list[float], data: st.DataObject
) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    split = block_partition(costs, num_parts)
    assert (len(split), split[0], split[-1]) == (num_parts + 1, 0, len(costs))
    assert all(first < last for first, last in pairwise(split))
    sums = exact_sums(costs, split)
    assert max(sums) - min(sums) <= Fraction(max(costs))


@settings(deadline=None, database=None)
@given(costs=small_costs, data=st.data())
def test_no_split_has_a_larger_smallest_part(costs: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    smallest = min(exact_sums(costs, block_partition(costs, num_parts)))
    for cuts in combinations(range(1, len(costs)), num_parts - 1):
        assert min(exact_sums(costs, (0, *cuts, len(costs)))) <= smallest


@settings(deadline=None, database=None)
@given(costs=small_costs, data=st.data())
def test_largest_part_is_between_the_best_one_and_twice_that(
    costs: list[int], data: st.DataObject
) -> None:
    num_parts = data.draw(st.integers(1, len(costs)))
    best_split = exact_split(costs, num_parts)
    assert best_split is not None
    best = max(exact_sums(costs, best_split))
    assert best <= max(exact_sums(costs, block_partition(costs, num_parts))) <= 2 * best


def test_one_to_six_in_two_parts_are_cut_after_the_four() -> None:
    assert block_partition([1, 2, 3, 4, 5, 6], 2) == (0, 4, 6)


def test_costs_far_above_zero_are_split_by_the_costs_not_by_what_they_exceed_the_least_by() -> (
    None
):
    # Less their minimum, only the last two would weigh, and the largest part would be 100.
    assert block_partition([10] * 8 + [20] * 2, 2) == (0, 6, 10)


def test_as_many_parts_as_units_hold_one_each_also_where_units_cost_nothing() -> None:
    assert block_partition([0, 5, 0, 0], 4) == (0, 1, 2, 3, 4)


def test_one_part_holds_all_units() -> None:
    assert block_partition([3, 1, 2], 1) == (0, 3)


def test_differences_hold_in_exact_arithmetic_where_float_sums_lose_units() -> None:
    costs = [2.0**53, 1.0, 1.0, 2.0**53, 1.0, 1.0]
    sums = exact_sums(costs, block_partition(costs, 2))
    assert sums == [2**53 + 2, 2**53 + 2]


def test_greedy_block_and_exact_split_of_vit_base_on_8_devices_side_by_side() -> None:
    sizes = vit_base_sizes(num_classes=100)
    exact = exact_split(sizes, 8)
    assert exact is not None
    splits = {
        "greedy": greedy_partition(sizes, 8),
        "block": block_partition(sizes, 8),
        "exact": exact,
    }
    balances = {
        name: [last - first for first, last in pairwise(split)] for name, split in splits.items()
    }
    assert balances == {
        "greedy": [4, 2, 3, 3, 3, 3, 4, 5],
        "block": [4, 3, 3, 3, 3, 3, 3, 5],
        "exact": [4, 3, 3, 3, 3, 3, 3, 5],
    }
    sums = {name: part_sums(sizes, split) for name, split in splits.items()}
    largest = {name: max(parts) for name, parts in sums.items()}
    # Published to two decimals.
    assert largest == pytest.approx({"greedy": 14.18, "block": 11.89, "exact": 11.89}, abs=0.005)
    # Only the greedy parts differ by more than the largest unit, an MLP of 4.72 million.
    assert {name: max(parts) - min(parts) > max(sizes) for name, parts in sums.items()} == {
        "greedy": True,
        "block": False,
        "exact": False,
    }

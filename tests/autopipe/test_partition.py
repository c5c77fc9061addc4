"""Prove that splits are optimal, against all splits and the published one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise

import pytest

from autopipe.partition import Feasible, best_split, greedy_partition, per_part


def all_splits(num_units: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_units), num_parts - 1):
        yield (0, *cuts, num_units)


def measures(
    part_cost: Callable[[int, int, int], float], split: tuple[int, ...]
) -> tuple[float, float]:
    costs = per_part(part_cost, split)
    return max(costs), sum(cost * cost for cost in costs)


def vit_base_sizes(num_classes: int) -> list[float]:
    """Count, in millions, the parameters of ViT-B/16's embedding, 24 sublayers, norm and head."""
    width, num_patches = 768, (224 // 16) ** 2
    norm = 2 * width
    patches, class_token, positions = (3 * 16 * 16 + 1) * width, width, (num_patches + 1) * width
    attention = norm + (width + 1) * 3 * width + (width + 1) * width
    mlp = norm + (width + 1) * 4 * width + (4 * width + 1) * width
    head = (width + 1) * num_classes
    sizes = (patches + class_token + positions, *(attention, mlp) * 12, norm, head)
    return [size / 1e6 for size in sizes]


def part_sums(sizes: list[float], split: tuple[int, ...]) -> list[float]:
    return [sum(sizes[first:last]) for first, last in pairwise(split)]


def exact_split(
    costs: Sequence[float], num_parts: int, *, feasible: Feasible | None = None
) -> tuple[int, ...] | None:
    total = [0.0, *accumulate(costs)]
    return best_split(
        len(costs), num_parts, lambda _, first, last: total[last] - total[first], feasible=feasible
    )


@pytest.mark.parametrize("seed", range(40))
def test_split_has_smallest_maximum_then_smallest_sum_of_squares_of_all_splits(seed: int) -> None:
    generator = random.Random(seed)
    num_units = generator.randint(1, 9)
    num_parts = generator.randint(1, num_units)
    costs = [generator.randint(0, 6) for _ in range(num_units)]  # Small integers: many ties.
    extra = generator.randint(0, 8)

    def part_cost(part: int, first: int, last: int) -> float:
        return sum(costs[first:last]) + (extra if part == 0 else 0)

    found = best_split(num_units, num_parts, part_cost)
    assert found is not None
    best = min(measures(part_cost, split) for split in all_splits(num_units, num_parts))
    assert measures(part_cost, found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_split_is_best_of_the_feasible_ones_where_cost_and_feasibility_depend_on_the_part(
    seed: int,
) -> None:
    generator = random.Random(seed)
    num_units = generator.randint(2, 9)
    num_parts = generator.randint(1, num_units)
    costs = [[generator.random() for _ in range(num_units)] for _ in range(num_parts)]
    banned = {
        (part, first, last)
        for part in range(num_parts)
        for first in range(num_units)
        for last in range(first + 1, num_units + 1)
        if generator.random() < 0.4
    }

    def part_cost(part: int, first: int, last: int) -> float:
        return sum(costs[part][first:last])

    found = best_split(num_units, num_parts, part_cost, feasible=lambda *part: part not in banned)
    allowed = [
        split
        for split in all_splits(num_units, num_parts)
        if banned.isdisjoint((part, *ends) for part, ends in enumerate(pairwise(split)))
    ]
    if not allowed:
        assert found is None
    else:
        assert found in allowed
        assert measures(part_cost, found) == pytest.approx(
            min(measures(part_cost, split) for split in allowed)
        )


@pytest.mark.parametrize("seed", range(40))
def test_split_is_best_where_a_part_may_get_cheaper_as_it_grows(seed: int) -> None:
    generator = random.Random(seed)
    num_units = generator.randint(1, 9)
    num_parts = generator.randint(1, num_units)
    costs = {
        (part, first, last): generator.random()
        for part in range(num_parts)
        for first in range(num_units)
        for last in range(first + 1, num_units + 1)
    }

    def part_cost(part: int, first: int, last: int) -> float:
        return costs[part, first, last]

    found = best_split(num_units, num_parts, part_cost, grows=False)
    assert found is not None
    # Only the largest cost: of splits that share it, the sum of squares tells.
    best = min(max(per_part(part_cost, one)) for one in all_splits(num_units, num_parts))
    assert max(per_part(part_cost, found)) == best


def test_no_feasible_split_gives_none() -> None:
    assert exact_split([1.0, 1.0], 2, feasible=lambda part, first, last: False) is None


def test_equal_costs_whose_sums_round_differently_are_split_evenly() -> None:
    assert exact_split([0.1] * 12, 4) == (0, 3, 6, 9, 12)


def test_cost_of_the_prefix_moves_the_first_boundary_down() -> None:
    assert exact_split([1.0] * 8, 2) == (0, 4, 8)
    assert best_split(8, 2, lambda part, a, b: b - a + (0.0 if part else 2.0)) == (0, 3, 8)


def test_greedy_split_of_vit_base_on_8_devices_is_the_published_one() -> None:
    sizes = vit_base_sizes(num_classes=100)
    split = greedy_partition(sizes, 8)
    assert [last - first for first, last in pairwise(split)] == [4, 2, 3, 3, 3, 3, 4, 5]
    assert max(part_sums(sizes, split)) == pytest.approx(14.18, abs=0.005)


@pytest.mark.parametrize(("num_classes", "largest"), [(100, 11.89), (1000, 12.58)])
def test_optimal_split_of_vit_base_on_8_devices_beats_the_greedy_one(
    num_classes: int, largest: float
) -> None:
    sizes = vit_base_sizes(num_classes)
    split = exact_split(sizes, 8)
    assert split is not None
    assert max(part_sums(sizes, split)) == pytest.approx(largest, abs=0.005)
    assert max(part_sums(sizes, split)) < max(part_sums(sizes, greedy_partition(sizes, 8)))


def test_greedy_split_depends_on_the_unit_of_the_sizes() -> None:
    sizes = [size * 1e6 for size in vit_base_sizes(num_classes=100)]
    assert greedy_partition(sizes, 3) == (0, len(sizes), len(sizes), len(sizes))


def test_greedy_split_keeps_every_unit_of_equal_size() -> None:
    assert greedy_partition([1.0] * 6, 3)[-1] == 6


def test_greedy_split_charges_the_frozen_prefix_to_the_first_part() -> None:
    sizes = [1.0, 2.0] * 6
    assert greedy_partition(sizes, 3, first_extra=3.0)[1] < greedy_partition(sizes, 3)[1]

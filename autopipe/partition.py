"""Split a chain of sublayers into contiguous parts, one a pipeline stage.

A split is written as its boundaries: part k holds the units from boundaries[k] up to, but not
with, boundaries[k + 1].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

PartCost = Callable[[int, int, int], float]
"""Cost of part `part` with the units first .. last - 1."""

Feasible = Callable[[int, int, int], bool]
"""Whether part `part` may hold the units first .. last - 1."""

_Join = Callable[[float, float], float]

_Split = tuple[float, tuple[int, ...]]
"""The joined cost of its parts, and its boundaries."""

_NONE: _Split = (math.inf, ())


def best_split(
    num_units: int,
    num_parts: int,
    part_cost: PartCost,
    *,
    feasible: Feasible | None = None,
    grows: bool = True,
) -> tuple[int, ...] | None:
    """Find the contiguous split whose dearest part is cheapest, of those the most even one.

    No part is empty, so there must be as many units. A first pass finds the smallest largest cost,
    a second one the smallest sum of squares under it. Returns num_parts + 1 boundaries; None where
    no split is feasible.

    Args:
        feasible: None allows every part.
        grows: whether no part's cost shrinks as it takes in more units below, so that the search
            may stop at the first that is too dear.
    """

    allowed = feasible or (lambda part, first, last: True)

    def solve(join: _Join, *, limit: float) -> _Split:
        """Minimise the joined costs of all parts, none above the limit."""
        # best[u] is the best split of the first u units into the parts so far.
        best = [(0.0, (0,))] + [_NONE] * num_units
        for part in range(num_parts):
            ends = range(part + 1, num_units - (num_parts - part - 1) + 1)
            extended = [extend(best[:last], part, join, limit) for last in ends]
            best = [_NONE] * ends.start + extended + [_NONE] * (num_units + 1 - ends.stop)
        return best[-1]

    def extend(best: list[_Split], part: int, join: _Join, limit: float) -> _Split:
        """Add a part to one of the splits of fewer units."""
        found, last = _NONE, len(best)
        for first in range(last - 1, part - 1, -1):
            cost = part_cost(part, first, last)
            if cost > limit or join(0.0, cost) >= found[0]:
                if grows:  # A longer part costs more still, so no smaller `first` can help.
                    break
                continue
            joined = join(best[first][0], cost)
            if joined < found[0] and allowed(part, first, last):
                found = joined, (*best[first][1], last)
        return found

    dearest, _ = solve(max, limit=math.inf)
    if dearest == math.inf:
        return None
    # The same parts summed in another order differ in the last bits; they count as equal.
    _, boundaries = solve(lambda total, cost: total + cost * cost, limit=dearest * (1 + 1e-9))
    return boundaries


def per_part(part_cost: PartCost, boundaries: tuple[int, ...]) -> list[float]:
    return [part_cost(part, *ends) for part, ends in enumerate(pairwise(boundaries))]


def greedy_partition(
    sizes: Sequence[float], num_parts: int, *, first_extra: float = 0.0
) -> tuple[int, ...]:
    """Fill part after part up to the mean plus the variance of what is left, as published.

    For comparison only: a variance has the unit of a squared size, so the split depends on the
    unit, and parts may be empty. Sizes in millions of parameters give the published balance.

    Part 0 bears `first_extra` besides its units, such as 1/6 of the frozen parameters. Returns
    num_parts + 1 boundaries.

    Source: PipeTransformer Algorithm 1, load_balance; where it prints B_S[i], B_S[k] is meant.
    Ours gives the last part all that is left; the strict `<` would drop a unit where the variance
    is zero.
    """
    boundaries = [0]
    for part in range(num_parts - 1):
        first = last = boundaries[-1]
        remaining = sizes[first:]
        spread = statistics.pvariance(remaining) if remaining else 0.0
        threshold = (sum(remaining) + spread) / (num_parts - part)
        load = first_extra if part == 0 else 0.0
        while last < len(sizes) and load + sizes[last] < threshold:
            load += sizes[last]
            last += 1
        boundaries.append(last)
    return (*boundaries, len(sizes))

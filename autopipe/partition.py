"""Split a chain of sublayers into contiguous parts, one for each pipeline stage.

A split is its boundaries: part k holds the units boundaries[k] .. boundaries[k + 1] - 1.
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
    """Find the contiguous split whose dearest part is cheapest; of several, the most even.

    No part is empty. A first pass finds the smallest largest cost. A second pass finds the
    smallest sum of squares under it. Returns num_parts + 1 boundaries; None if none is feasible.
    A cost that `grows` never gets cheaper by taking more units below.
    """
    allowed = feasible or (lambda part, first, last: True)

    def solve(join: _Join, *, limit: float) -> _Split:
        """Minimise the joined costs of all parts, none above the limit."""
        # best[u] splits the first u units into the parts so far.
        best = [(0.0, (0,))] + [_NONE] * num_units
        for part in range(num_parts):
            # A unit at least for each part below and above.
            ends = range(part + 1, num_units - (num_parts - part - 1) + 1)
            extended = [extend(best[:last], part, join, limit) for last in ends]
            best = [_NONE] * ends.start + extended + [_NONE] * (num_units + 1 - ends.stop)
        return best[-1]

    def extend(best: list[_Split], part: int, join: _Join, limit: float) -> _Split:
        """Add a part to one of the splits of fewer units."""
        cheapest, last = _NONE, len(best)
        for first in range(last - 1, part - 1, -1):
            cost = part_cost(part, first, last)
            if cost > limit or join(0.0, cost) >= cheapest[0]:
                if grows:  # Smaller `first` only makes the part dearer.
                    break
                continue
            joined = join(best[first][0], cost)
            if joined < cheapest[0] and allowed(part, first, last):
                cheapest = joined, (*best[first][1], last)
        return cheapest

    dearest, _ = solve(max, limit=math.inf)
    if dearest == math.inf:
        return None
    # The slack of 1e-9: the same parts summed in another order differ in the last bits.
    _, boundaries = solve(lambda total, cost: total + cost * cost, limit=dearest * (1 + 1e-9))
    return boundaries


def per_part(part_cost: PartCost, boundaries: tuple[int, ...]) -> list[float]:
    return [part_cost(part, *ends) for part, ends in enumerate(pairwise(boundaries))]


def greedy_partition(
    sizes: Sequence[float], num_parts: int, *, first_extra: float = 0.0
) -> tuple[int, ...]:
    """Fill each part up to the mean plus the variance of the remaining sizes, as published.

    For comparison only: a variance has the unit of a squared size, so the split depends on the
    unit. Sizes in millions of parameters give the published balance. Parts may be empty.

    Args:
        first_extra: added to part 0's load, such as 1/6 of the frozen parameters.
    Returns:
        num_parts + 1 boundaries.
    Source: PipeTransformer Algorithm 1, load_balance; where it prints B_S[i], B_S[k] is meant.
    Ours gives the last part all that is left, as the strict `<` drops a unit at zero variance.
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

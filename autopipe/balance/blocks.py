"""Split a chain into contiguous parts whose sums differ by at most its largest element.

Legend: M is the largest cost, c the largest smallest sum that any split into so many parts has.

1. From the right, start every part as late as its sum still reaches c: `latest`. No such part has
   a sum above c + M, as one unit less would not reach c.
2. From the left, end every part as late as its sum stays within c + M, but no later than the
   next start in `latest`, so that what follows can still reach c.

A part that ends at a start in `latest` is followed by parts of `latest`, within c + M by step 1.
If none does, all but the last ended before a unit that did not fit, so their sums exceed c; the
last cannot exceed c + M, or all would exceed c, the largest smallest sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def block_partition(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Split costs into parts, none of them empty; return num_parts + 1 boundaries.

    Of all splits none has a larger smallest part. The largest part is at most twice the best one.

    Source: Barany and Grinberg, Block partitions of sequences (2015), whose theorem this keeps.
    They move boundaries one by one; ours builds the parts in two passes, and fills them all.
    """
    # Sums of floats depend on their order; a guarantee about their difference needs exact ones.
    exact = [Fraction(cost) for cost in costs]
    total = [Fraction(0), *accumulate(exact)]
    smallest, latest = _largest_smallest_part(total, num_parts)
    boundaries = [0]
    for next_start in latest[1:]:
        limit = total[boundaries[-1]] + smallest + max(exact)
        boundaries.append(min(next_start, bisect_right(total, limit) - 1))
    return tuple(boundaries)


def _largest_smallest_part(
    total: list[Fraction], num_parts: int
) -> tuple[Fraction, tuple[int, ...]]:
    smallest = Fraction(0)
    while (better := _latest_starts(total, num_parts, smallest, strict=True)) is not None:
        smallest = min(total[last] - total[first] for first, last in pairwise(better))
    latest = _latest_starts(total, num_parts, smallest, strict=False)
    assert latest is not None
    return smallest, latest


def _latest_starts(
    total: list[Fraction], num_parts: int, smallest: Fraction, *, strict: bool
) -> tuple[int, ...] | None:
    """Start every part as late as its sum reaches (strict: exceeds) the smallest one.

    The first part is all that is left; None where too little is.
    """
    find = bisect_left if strict else bisect_right
    starts = [len(total) - 1]
    for part in reversed(range(num_parts)):
        # A part has at least one unit, also where units cost nothing.
        start = min(find(total, total[starts[-1]] - smallest), starts[-1]) - 1
        if start < part:
            return None
        starts.append(start)
    return (0, *reversed(starts[:-1]))

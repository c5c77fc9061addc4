"""Make profiles for tests of planning, from costs that are easy to add up by hand."""

from __future__ import annotations

import math

from autopipe.profile.network import AllReduceCost, LinkCost

FREE = LinkCost(0.0, math.inf)


def sums(latency_s: float = 0.0, bytes_per_s: float = math.inf) -> tuple[AllReduceCost, ...]:
    """Cost rings of 2..64 replicas: each rank passes on 2 (R - 1) / R times the bytes."""
    sizes = (1 << 10, 1 << 20)
    return tuple(
        AllReduceCost(
            replicas,
            (0, *sizes),
            tuple(
                latency_s + 2 * (replicas - 1) / replicas * size / bytes_per_s
                for size in (0, *sizes)
            ),
        )
        for replicas in range(2, 65)
    )

"""Fit a shape to measured times, which noise must not bend.

A sublayer takes a + b n seconds for n samples: a to launch it, b for each sample. With a and b at
least 0, more samples never take less time, and few never less than their share.

State what it costs to send bytes from one stage to the next, and to sum them over replicas.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import mul

import numpy as np

EXACT = (1.0, 1.0)
"""Quartiles of what was not measured, or once."""


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the times at ascending sizes on the line that fits all of them best.

    Deviations count relative to a time, so that the smallest size has as much to say as the
    largest. One size is left as it is.
    """
    if len(sizes) == 1 or min(seconds) <= 0:
        return tuple(seconds)
    weights = [1 / one**2 for one in seconds]
    total = sum(weights)
    mean_n = sum(map(mul, weights, sizes)) / total
    mean_s = sum(map(mul, weights, seconds)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    joint = sum(
        w * (n - mean_n) * (s - mean_s) for w, n, s in zip(weights, sizes, seconds, strict=True)
    )
    slope = max(0.0, joint / spread)
    start = mean_s - slope * mean_n
    if start < 0:
        start = 0.0
        slope = sum(w * n * s for w, n, s in zip(weights, sizes, seconds, strict=True)) / sum(
            w * n**2 for w, n in zip(weights, sizes, strict=True)
        )
    return tuple(start + slope * size for size in sizes)


def quartiles(repeats_s: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of repeats, as shares of their median."""
    low_s, median_s, high_s = np.quantile(repeats_s, (0.25, 0.5, 0.75)).tolist()
    return (low_s / median_s, high_s / median_s) if median_s > 0 else EXACT


def uncertainty(rounds_s: Sequence[float]) -> float:
    """Return the standard error of the median of repeats, as a share of it; 0 for one."""
    if len(rounds_s) < 2:
        return 0.0
    # A sample's median varies 1.25 times as much as its mean does.
    error_s = 1.25 * statistics.stdev(rounds_s) / len(rounds_s) ** 0.5
    return error_s / max(statistics.median(rounds_s), 1e-9)


@dataclass(frozen=True)
class LinkCost:
    """State what a message costs.

    Args:
        latency_s: the time of an empty one.
        bytes_per_s: rate of its bytes; math.inf where they cost nothing.
        overhead_s: either end's own time to hand it over or to take it, in which nothing is
            computed there.
        spread: quartiles of what a message took, as shares of the median.
    """

    latency_s: float
    bytes_per_s: float
    overhead_s: float = 0.0
    spread: tuple[float, float] = EXACT

    def __post_init__(self) -> None:
        if min(self.latency_s, self.overhead_s) < 0 or self.bytes_per_s <= 0:
            raise ValueError(
                f"a link needs a latency of at least 0 s and a positive rate, got "
                f"{self.latency_s} s and {self.bytes_per_s} bytes/s"
            )

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def at_quartile(self, which: int) -> LinkCost:
        """Return the cost at the lower quartile (0) or at the upper one (1)."""
        share = self.spread[which]
        return LinkCost(share * self.latency_s, self.bytes_per_s / share, share * self.overhead_s)


@dataclass(frozen=True)
class Ring:
    """State the way of a stage's sum.

    Args:
        num_sharing: rings, it included, that leave the busiest of its nodes at once, over that
            node's one link; 0 where all its ranks are on one node.
    """

    num_ranks: int
    num_sharing: int = 0


@dataclass(frozen=True)
class RingCost:
    """State what sums cost over links that are described: within a node, and of a node."""

    link: LinkCost
    node_link: LinkCost

    def seconds(self, ring: Ring, num_bytes: float) -> float:
        """Price 2 (R - 1) messages, in each of which each of R ranks sends 1 / R of the bytes.

        A ring is as slow as its slowest edge.
        """
        edge = self.link
        if ring.num_sharing:
            edge = LinkCost(
                max(self.link.latency_s, self.node_link.latency_s),
                min(self.link.bytes_per_s, self.node_link.bytes_per_s / ring.num_sharing),
            )
        return 2 * (ring.num_ranks - 1) * edge.seconds(num_bytes / ring.num_ranks)


@dataclass(frozen=True)
class AllReduceCost:
    """State what it was measured to cost to sum gradients over the replicas of a stage.

    Args:
        num_bytes: measured sizes, ascending.
        seconds: one a size.
        spread: quartiles of what a sum took, as shares of the median.
    """

    num_replicas: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, float] = EXACT

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise(self.num_bytes))
        if self.num_replicas < 2 or not self.num_bytes or not ascending:
            raise ValueError(
                f"a sum needs 2 or more replicas and ascending sizes, got {self.num_replicas} "
                f"replicas and {self.num_bytes} bytes"
            )
        if len(self.seconds) != len(self.num_bytes):
            raise ValueError(
                f"{len(self.num_bytes)} sizes have {len(self.seconds)} times; give one each"
            )

    def at_quartile(self, which: int) -> AllReduceCost:
        """Return the cost at the lower quartile (0) or at the upper one (1)."""
        seconds = tuple(self.spread[which] * one for one in self.seconds)
        return replace(self, seconds=seconds, spread=EXACT)

    def at(self, num_bytes: float) -> float:
        """Interpolate between the sizes; beyond the largest, bytes cost what its bytes cost."""
        sizes, seconds = self.num_bytes, self.seconds
        right = bisect_right(sizes, num_bytes)
        if right == 0:
            return seconds[0]
        if right == len(sizes):
            return seconds[-1] * num_bytes / sizes[-1]
        (x0, x1), (y0, y1) = sizes[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)

"""State what it costs to send bytes from one stage to the next, and to sum them over replicas."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

from autopipe.profile.fit import EXACT


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

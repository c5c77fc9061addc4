"""State what messages between stages cost, and sums of gradients over replicas."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise

EXACT = (1.0, 1.0)
"""Quartiles without a spread: measured once, or not at all."""


@dataclass(frozen=True)
class LinkCost:
    """State what a message costs.

    Args:
        latency_s: an empty message's time.
        bytes_per_s: math.inf if bytes cost nothing.
        overhead_s: either end's own time to send or to take it, in which it computes nothing.
        spread: quartiles of measured times, as shares of the median.
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
        # A longer time is a larger latency and a lower rate. The copy has no spread of its own.
        share = self.spread[which]
        return LinkCost(share * self.latency_s, self.bytes_per_s / share, share * self.overhead_s)


@dataclass(frozen=True)
class Ring:
    """Describe the ring over which a stage sums its gradients.

    Args:
        num_sharing: rings, this one included, that share the link of its busiest node; 0 if all
            its ranks are on one node.
    """

    num_ranks: int
    num_sharing: int = 0


@dataclass(frozen=True)
class RingCost:
    """State what sums cost over described links, between a node's slots and between nodes."""

    link: LinkCost
    node_link: LinkCost

    def seconds(self, ring: Ring, num_bytes: float) -> float:
        """Price 2 (R - 1) messages, in each of which each of R ranks sends 1 / R of the bytes."""
        edge = self.link
        if ring.num_sharing:
            # A ring is as slow as its slowest edge.
            edge = LinkCost(
                max(self.link.latency_s, self.node_link.latency_s),
                min(self.link.bytes_per_s, self.node_link.bytes_per_s / ring.num_sharing),
            )
        return 2 * (ring.num_ranks - 1) * edge.seconds(num_bytes / ring.num_ranks)


@dataclass(frozen=True)
class AllReduceCost:
    """State the measured cost of summing gradients over a stage's replicas.

    Args:
        num_bytes: measured sizes, ascending.
        seconds: one for each size.
        spread: quartiles of measured times, as shares of the median.
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
        """Interpolate between the measured sizes; beyond the largest, scale its time."""
        sizes, seconds = self.num_bytes, self.seconds
        right = bisect_right(sizes, num_bytes)
        if right == 0:  # Few bytes: the latency counts.
            return seconds[0]
        if right == len(sizes):
            return seconds[-1] * num_bytes / sizes[-1]
        (x0, x1), (y0, y1) = sizes[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)

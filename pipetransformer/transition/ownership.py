"""Say which ranks hold which sublayer's weights and optimizer state under a plan.

The unit that is owned, moved and saved is the sublayer. Its owner is the lowest rank that holds
it. A trained sublayer lives, with its optimizer state, on every rank of its stage. A frozen one
lives on every stage 0, which runs the frozen prefix; its optimizer state waits for a thaw at the
owner alone, which is rank 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from autodp import Topology

WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Ownership:
    """Hold the placement of every sublayer.

    Args:
        names: all sublayers, in order.
        topology: which rank is which stage.
        boundaries: K + 1 sublayer indices; stage j trains [boundaries[j], boundaries[j + 1]).
    Raises:
        ValueError: the boundaries, of a user's own planner perhaps, do not give every stage
            sublayers to train.
    """

    names: tuple[str, ...]
    topology: Topology
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds, length = self.boundaries, self.topology.length
        if (
            len(bounds) != length + 1
            or bounds[0] < 0
            or bounds[-1] != len(self.names)
            or any(before >= after for before, after in pairwise(bounds))
        ):
            raise ValueError(
                f"a plan of length {length} has boundaries {bounds}; its planner "
                f"must give {length + 1} that ascend, from 0 or more to "
                f"{len(self.names)}, the number of sublayers"
            )

    def trained_by(self, rank: int) -> range:
        """Return the sublayers a rank trains; a spare has none."""
        if self.topology.is_spare(rank):
            return range(0)
        stage = self.topology.stage_of(rank)
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the sublayers whose weights a rank holds, in order."""
        runs_prefix = self.topology.stage_of(rank) == 0
        return (*range(self.boundaries[0] if runs_prefix else 0), *self.trained_by(rank))

    def parked_by(self, rank: int) -> range:
        """Return the frozen sublayers whose optimizer state waits for a thaw at a rank."""
        return range(self.boundaries[0] if rank == 0 else 0)

    def shards(self) -> dict[str, frozenset[int]]:
        """Return the ranks that hold each shard: a sublayer's weights, or its optimizer state."""
        holders: dict[str, frozenset[int]] = {}
        for index, name in enumerate(self.names):
            stage = max(0, sum(index >= first for first in self.boundaries) - 1)
            ranks = frozenset(self.topology.stage_ranks(stage))
            holders[shard_name(name, WEIGHTS)] = ranks
            is_frozen = index < self.boundaries[0]
            holders[shard_name(name, OPTIMIZER)] = frozenset([0]) if is_frozen else ranks
        return holders

    def shards_of(self, rank: int) -> tuple[str, ...]:
        """Name the shards that a rank holds."""
        return tuple(name for name, ranks in self.shards().items() if rank in ranks)


def shard_name(sublayer: str, kind: str) -> str:
    """Name a shard."""
    return f"{sublayer}/{kind}"


def split_shard_name(shard: str) -> tuple[str, str]:
    """Return a shard's sublayer and kind."""
    sublayer, _, kind = shard.rpartition("/")
    return sublayer, kind

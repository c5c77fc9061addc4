"""Say which ranks hold which sublayer's weights and optimizer state under a plan.

The unit that is owned, moved and saved is the sublayer. Its owner is the lowest rank that holds
it. A trained sublayer lives, with its optimizer state, on every rank of its stage. A frozen one
lives on every stage 0, which runs the frozen prefix; its optimizer state waits for a thaw at the
owner alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autodp import Topology
from autopipe.plan import PipelinePlan

WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Ownership:
    """Hold the placement of every sublayer.

    Args:
        names: all sublayers, in order.
        topology: which rank is which stage.
        boundaries: K + 1 sublayer indices; stage j trains [boundaries[j], boundaries[j + 1]).
    """

    names: tuple[str, ...]
    topology: Topology
    boundaries: tuple[int, ...]

    @property
    def num_frozen_sublayers(self) -> int:
        """Return the length of the frozen prefix, in sublayers."""
        return self.boundaries[0]

    def trained_by(self, rank: int) -> range:
        """Return the sublayers a rank trains; a spare has none."""
        if self.topology.is_spare(rank):
            return range(0)
        stage = self.topology.stage_of(rank)
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the sublayers whose weights a rank holds, in order."""
        runs_prefix = self.topology.stage_of(rank) == 0
        prefix = range(self.num_frozen_sublayers if runs_prefix else 0)
        return (*prefix, *self.trained_by(rank))

    def parked_by(self, rank: int) -> range:
        """Return the frozen sublayers whose optimizer state waits for a thaw at a rank."""
        # Every stage 0 holds all frozen sublayers, so they have one owner.
        frozen = self.num_frozen_sublayers
        return range(frozen if frozen and self.owner(0) == rank else 0)

    def owner(self, index: int) -> int:
        """Return the lowest rank that holds a sublayer."""
        return min(self._ranks(index))

    def shards(self) -> dict[str, frozenset[int]]:
        """Return the ranks that hold each shard: a sublayer's weights, or its optimizer state."""
        holders: dict[str, frozenset[int]] = {}
        for index, name in enumerate(self.names):
            ranks = self._ranks(index)
            frozen = index < self.num_frozen_sublayers
            holders[shard_name(name, WEIGHTS)] = ranks
            holders[shard_name(name, OPTIMIZER)] = frozenset([min(ranks)]) if frozen else ranks
        return holders

    def _ranks(self, index: int) -> frozenset[int]:
        if index < self.num_frozen_sublayers:
            return frozenset(self.topology.stage_ranks(0))
        stage = next(j for j in range(self.topology.length) if index < self.boundaries[j + 1])
        return frozenset(self.topology.stage_ranks(stage))


def place(names: Sequence[str], topology: Topology, plan: PipelinePlan) -> Ownership:
    """Return the placement that a plan asks for.

    Raises:
        ValueError: the plan, a user's own perhaps, does not give every stage sublayers to train.
    """
    bounds = plan.boundaries
    if (
        len(bounds) != plan.length + 1
        or bounds[0] < 0
        or bounds[-1] != len(names)
        or any(before >= after for before, after in pairwise(bounds))
    ):
        raise ValueError(
            f"a plan of length {plan.length} has boundaries {bounds}; its planner "
            f"must give {plan.length + 1} that ascend, from 0 or more to "
            f"{len(names)}, the number of sublayers"
        )
    return Ownership(tuple(names), topology, plan.boundaries)


def held_by_rank_0(names: Sequence[str]) -> Mapping[str, frozenset[int]]:
    """Return the shards' holders before training: rank 0's weights win."""
    return {
        shard_name(name, kind): frozenset([0]) for name in names for kind in (WEIGHTS, OPTIMIZER)
    }


def shard_name(sublayer: str, kind: str) -> str:
    """Name a shard."""
    return f"{sublayer}/{kind}"


def split_shard_name(shard: str) -> tuple[str, str]:
    """Return a shard's sublayer and kind."""
    sublayer, _, kind = shard.rpartition("/")
    return sublayer, kind

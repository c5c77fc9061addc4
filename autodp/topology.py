"""Say which stage of which replica every rank is.

Legend: K stages a pipeline, R replicas, world = K * R ranks, rank = replica * K + stage.

    8 ranks, K = 2:   replica   0    1    2    3
                      stage 0   0    2    4    6      stage group of stage 0: ranks 0 2 4 6
                      stage 1   1    3    5    7      pipeline group of replica 1: ranks 2 3

Where K leaves a remainder, the last ranks of each node, or of the world where a pipeline spans
nodes, are spares. They are the stage and the replica after the last, and in no pipeline.

    2 nodes of 3 slots, K = 2:   pipelines 0 1 and 3 4, spares 2 and 5
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Map ranks to stages and replicas.

    Args:
        num_ranks: ranks in the world.
        slots_per_node: device slots (ranks) of one node.
        length: stages of a pipeline (K).
    Raises:
        ValueError: there is no rank or no slot, or no pipeline of this length is possible.
    """

    num_ranks: int
    slots_per_node: int
    length: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.slots_per_node < 1:
            raise ValueError(
                f"a cluster needs at least one rank and one slot a node, got "
                f"{self.num_ranks} ranks and {self.slots_per_node} slots"
            )
        if not self._is_possible(self.length):
            possible = filter(self._is_possible, range(1, self.num_ranks + 1))
            raise ValueError(
                f"pipeline length {self.length} does not fit {self.num_ranks} ranks with "
                f"{self.slots_per_node} slots a node; choose one of {list(possible)}"
            )

    @property
    def replicas(self) -> int:
        """Return how many pipelines train side by side."""
        blocks, rest = divmod(self.num_ranks, self._block)
        return blocks * (self._block // self.length) + rest // self.length

    @property
    def spares(self) -> tuple[int, ...]:
        """Return the ranks that no pipeline has a stage for."""
        return tuple(rank for rank in range(self.num_ranks) if self.is_spare(rank))

    def is_spare(self, rank: int) -> bool:
        """Tell whether no pipeline has a stage for a rank."""
        return self.replica_of(rank) == self.replicas

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs; K for a spare."""
        return self.length if self.is_spare(rank) else rank % self._block % self.length

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank belongs to; R for a spare."""
        block, position = divmod(rank, self._block)
        block_size = min(self._block, self.num_ranks - block * self._block)
        if position >= block_size // self.length * self.length:
            return self.replicas
        return block * (self._block // self.length) + position // self.length

    def pipeline_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline, first stage first."""
        block, position = divmod(replica, self._block // self.length)
        first = block * self._block + position * self.length
        return tuple(range(first, first + self.length))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold the same stage, one a replica."""
        return tuple(self.pipeline_ranks(replica)[stage] for replica in range(self.replicas))

    def _is_possible(self, length: int) -> bool:
        """Tell whether a pipeline stays within a node, or fills whole ones, and finds room."""
        slots = self.slots_per_node
        return 0 < length <= self.num_ranks and (length <= slots or length % slots == 0)

    @property
    def _block(self) -> int:
        """Return the consecutive ranks that pipelines are packed into: a node's, or one's own."""
        return max(self.slots_per_node, self.length)

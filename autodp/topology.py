"""Say which stage of which replica every rank is.

Legend: K stages a pipeline, R replicas, world = K * R ranks, rank = replica * K + stage.

    8 ranks, K = 2:   replica   0    1    2    3
                      stage 0   0    2    4    6      stage group of stage 0: ranks 0 2 4 6
                      stage 1   1    3    5    7      pipeline group of replica 1: ranks 2 3
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
        ValueError: K does not divide the world, or neither divides the slots of a node nor is a
            multiple of them.
    """

    num_ranks: int
    slots_per_node: int
    length: int

    def __post_init__(self) -> None:
        if self.length not in allowed_lengths(self.num_ranks, self.slots_per_node):
            allowed = allowed_lengths(self.num_ranks, self.slots_per_node)
            raise ValueError(
                f"pipeline length {self.length} does not fit {self.num_ranks} ranks with "
                f"{self.slots_per_node} slots a node; choose one of {list(allowed)}")

    @property
    def replicas(self) -> int:
        """Return how many pipelines train side by side."""
        return self.num_ranks // self.length

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs."""
        return rank % self.length

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        return rank // self.length

    def node_of(self, rank: int) -> int:
        """Return the node that a rank runs on."""
        return rank // self.slots_per_node

    def pipeline_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline, first stage first."""
        return tuple(range(replica * self.length, (replica + 1) * self.length))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold the same stage, one a replica."""
        return tuple(range(stage, self.num_ranks, self.length))


def allowed_lengths(num_ranks: int, slots_per_node: int) -> tuple[int, ...]:
    """Return the pipeline lengths that a cluster allows, in ascending order.

    Raises:
        ValueError: there is no rank or no slot.
    """
    if num_ranks < 1 or slots_per_node < 1:
        raise ValueError(f"a cluster needs at least one rank and one slot a node, got {num_ranks} "
                         f"ranks and {slots_per_node} slots")
    return tuple(length for length in range(1, num_ranks + 1) if num_ranks % length == 0
                 and (slots_per_node % length == 0 or length % slots_per_node == 0))

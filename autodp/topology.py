"""Say which stage of which replica every rank is.

Legend: K stages a pipeline, R replicas, world = K * R ranks, rank = replica * K + stage.

    8 ranks, K = 2:   replica   0    1    2    3
                      stage 0   0    2    4    6      stage group of stage 0: ranks 0 2 4 6
                      stage 1   1    3    5    7      pipeline group of replica 1: ranks 2 3

Where K leaves a remainder, the last ranks of each node are spares; of the world, if a pipeline
spans nodes. A spare is in no pipeline; its stage is K and its replica R.

    2 nodes of 3 slots, K = 2:   pipelines 0 1 and 3 4, spares 2 and 5

Or all ranks are one pipeline whose stages have several workers, which take micro-batches in turn:

    4 ranks, 2 and 1 and 1 workers:   stage 0: ranks 0 1, stage 1: rank 2, stage 2: rank 3
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm


@dataclass(frozen=True)
class Topology:
    """Map ranks to stages and replicas.

    Args:
        slots_per_node: device slots (ranks) of one node.
        length: stages of a pipeline (K).
        max_replicas: most pipelines; further ranks are spares. None for no limit.
        stage_workers: workers of each stage of one pipeline of all ranks; None for one each.
    Raises:
        ValueError: there is no rank or no slot, or no pipeline of this length is possible.
    """

    num_ranks: int
    slots_per_node: int
    length: int
    max_replicas: int | None = None
    stage_workers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.slots_per_node < 1:
            counts = f"{self.num_ranks} ranks and {self.slots_per_node} slots"
            raise ValueError(
                f"a cluster needs at least one rank and one slot a node, got {counts}"
            )
        if self.stage_workers is not None:
            if (len(self.stage_workers), sum(self.stage_workers)) != (self.length, self.num_ranks):
                raise ValueError(
                    f"{self.length} stages with {self.stage_workers} workers do not make a "
                    f"pipeline of {self.num_ranks} ranks"
                )
        elif not self._is_possible(self.length):
            possible = filter(self._is_possible, range(1, self.num_ranks + 1))
            raise ValueError(
                f"pipeline length {self.length} does not fit {self.num_ranks} ranks with "
                f"{self.slots_per_node} slots a node; choose one of {list(possible)}"
            )

    @property
    def workers(self) -> tuple[int, ...]:
        """Return the number of ranks of each stage of a pipeline."""
        return self.stage_workers or (1,) * self.length

    @property
    def common_turn(self) -> int:
        """Return the number of micro-batches after which all turns are at first workers again."""
        return lcm(*self.workers)

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every pipeline, first stage first."""
        if self.stage_workers is not None:
            return (tuple(range(self.num_ranks)),)
        # A node, or the consecutive nodes that one pipeline spans: no pipeline crosses a block.
        block = max(self.slots_per_node, self.length)
        ranks = range(self.num_ranks)
        packed = (ranks[start : start + block] for start in ranks[::block])
        pipelines = tuple(
            tuple(block_ranks[i : i + self.length])
            for block_ranks in packed
            for i in range(0, len(block_ranks) - self.length + 1, self.length)
        )
        return pipelines[: self.max_replicas]

    @property
    def replicas(self) -> int:
        return len(self.pipelines)

    @property
    def spares(self) -> tuple[int, ...]:
        return tuple(filter(self.is_spare, range(self.num_ranks)))

    def is_spare(self, rank: int) -> bool:
        return self.replica_of(rank) == self.replicas

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs; K for a spare."""
        replica = self.replica_of(rank)
        if replica == self.replicas:
            return self.length
        return bisect_right(self._ends, self.pipelines[replica].index(rank))

    def worker_of(self, rank: int) -> int:
        """Return a rank's number among the workers of its stage, in its pipeline."""
        replica, stage = self.replica_of(rank), self.stage_of(rank)
        return 0 if stage == self.length else self.stage_of_replica(replica, stage).index(rank)

    def stage_of_replica(self, replica: int, stage: int) -> tuple[int, ...]:
        """Return the ranks of one pipeline that run a stage, in order of their turns."""
        end = self._ends[stage]
        return self.pipelines[replica][end - self.workers[stage] : end]

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank belongs to; R for a spare."""
        return self._replica_of.get(rank, self.replicas)

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage, in all replicas."""
        return tuple(
            rank
            for replica in range(self.replicas)
            for rank in self.stage_of_replica(replica, stage)
        )

    def is_on_one_node(self, ranks: Iterable[int]) -> bool:
        return len({rank // self.slots_per_node for rank in ranks}) == 1

    @cached_property
    def _replica_of(self) -> dict[int, int]:
        return {rank: n for n, ranks in enumerate(self.pipelines) for rank in ranks}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Return where each stage ends among a pipeline's ranks."""
        return tuple(accumulate(self.workers))

    def _is_possible(self, length: int) -> bool:
        """Return whether a pipeline stays within a node, or fills whole ones, and finds room."""
        slots = self.slots_per_node
        return 0 < length <= self.num_ranks and (length <= slots or length % slots == 0)

"""Build the process groups of a topology, and destroy them when it is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from autodp.topology import Topology


@dataclass(frozen=True)
class Groups:
    """Hold the groups one rank belongs to; None where a group would have one member.

    Args:
        forward: the pipeline's ranks, for what travels from stage j to j + 1.
        backward: the same ranks, for what travels back. On NCCL a communicator of its own, because
            a link's two directions must not queue behind each other; with gloo, whose messages
            carry tags, the same group.
        stage: the replicas of this rank's stage, for gradients.
    """

    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None

    def destroy(self) -> None:
        """Free every group; collective over its members."""
        for group in {id(g): g for g in (self.forward, self.backward, self.stage) if g}.values():
            dist.destroy_process_group(group)


def build_groups(topology: Topology, rank: int, *, on_cuda: bool, timeout_s: float) -> Groups:
    """Build the groups of a topology; every rank of the world calls it at the same point.

    Args:
        topology: who is what.
        rank: this rank.
        on_cuda: whether tensors on the links live on GPUs.
        timeout_s: seconds after which a collective or a wait in these groups fails.
    """
    stages = [topology.stage_ranks(stage) for stage in range(topology.length)]
    pipelines = [topology.pipeline_ranks(replica) for replica in range(topology.replicas)]
    stage = _own_group(stages, rank, timeout_s)
    forward = _own_group(pipelines, rank, timeout_s)
    if not on_cuda or forward is None:
        return Groups(forward, forward, stage)
    backward = _own_group(pipelines, rank, timeout_s)
    pipeline = topology.pipeline_ranks(topology.replica_of(rank))
    for group, ranks in ((forward, pipeline), (backward, pipeline[::-1])):
        open_links(ranks, rank, group=group, device=torch.device("cuda"))
    return Groups(forward, backward, stage)


def open_links(ranks: Sequence[int], rank: int, *, group: dist.ProcessGroup | None,
               device: torch.device) -> None:
    """Pass one number from each rank to the next, first link first.

    NCCL builds a link's communicator at its first message, and both ends block in it. Left to the
    schedule, a stage that posts a receive ahead would block before it sends what the answer needs.
    """
    number = torch.zeros(1, device=device)
    for source, destination in pairwise(ranks):
        if rank == source:
            dist.send(number, destination, group=group)
        elif rank == destination:
            dist.recv(number, source, group=group)


def _own_group(members: list[tuple[int, ...]], rank: int, timeout_s: float
               ) -> dist.ProcessGroup | None:
    """Create a group of each member list, in the same order on every rank; return this rank's."""
    own = None
    for ranks in members:
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own = group
    return own

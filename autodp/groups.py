"""Build the process groups of topologies: over gloo ahead of the first step, else at transitions.

Building a gloo group takes a rank 11-15 ms (2 to 8 ranks on two cores, meeting through a file).
Keeping it takes idle sockets and three threads, one of which wakes 100 times a second. So groups
of all lengths are built at the start, and no transition waits. An NCCL communicator holds memory
of its GPU, so it is built when it is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise, product
from typing import final

import torch
import torch.distributed as dist

from autodp.topology import Topology

_MOST_CONNECTIONS = 512
"""Sockets that groups built ahead may keep open in a process: half of the common limit.
128 ranks need 494 for pipelines of all lengths."""

_NCCL_PATIENCE = 3.0
"""NCCL's own time limit, as a multiple of ours. NCCL ends the process and names no rank, so ours
must come first. It counts from an operation's launch, perhaps two steps before the GPU runs it."""


def link_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device that messages travel from: the tensor's own over NCCL, else the CPU."""
    on_nccl = group is not None and "cuda:nccl" in dist.get_backend_config(group).split(",")
    return device if device.type == "cuda" and on_nccl else torch.device("cpu")


@dataclass(frozen=True)
class Groups:
    """Hold the groups one rank belongs to; None where a group would have one member.

    Attributes:
        forward: the pipeline's ranks, for messages from stage j to j + 1.
        backward: the same ranks, for messages back. With NCCL another communicator, as the two
            directions must not queue behind each other; gloo has tags, so it is `forward`.
        stage: the replicas of this rank's stage, for gradients.
        everyone: with NCCL all ranks, for a step's sums; it is `stage` where that has them all.
    """

    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None = None

    def limit_waits(self, timeout_s: float) -> None:
        """Let collectives in these groups fail after `timeout_s` from now on."""
        for group in self._distinct():
            group.set_timeout(timedelta(seconds=timeout_s))

    def abort(self) -> None:
        """End all GPU operations in these groups, for good; any thread may call it."""
        # Freeing a communicator waits for all kernels of its GPU, and another group's kernels end
        # only when that group is aborted too. So abort all groups at the same time.
        threads = [threading.Thread(target=group.abort, daemon=True) for group in self._distinct()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def destroy(self) -> None:
        """Free every group; collective over its members."""
        for group in self._distinct():
            dist.destroy_process_group(group)

    def _distinct(self) -> list[dist.ProcessGroup]:
        groups = (self.forward, self.backward, self.stage, self.everyone)
        return list({id(group): group for group in groups if group is not None}.values())


@final
class GroupPool:
    """Hold the groups of the present topology, and over gloo those of all likely topologies.

    Args:
        on_cuda: whether messages are in GPU memory, over NCCL.
        timeout_s: longest wait for the other ranks while groups are built.
        backend: None for the default group's.
    Attributes:
        rebuild_s: seconds that building took for the present pipeline length, where another one's
            groups will have to be built, too; 0 where all are built ahead.
    """

    def __init__(
        self,
        rank: int,
        likely: Sequence[Topology],
        *,
        on_cuda: bool,
        timeout_s: float,
        backend: str | None = None,
    ) -> None:
        self._rank = rank
        self._on_cuda = on_cuda
        self._timeout_s, self._backend = timeout_s, backend
        connections = sum(t.length - 1 + t.replicas - 1 for t in likely)
        self._ahead = likely if not on_cuda and connections <= _MOST_CONNECTIONS else ()
        self._built: dict[int, Groups] = {}
        self.rebuild_s = 0.0

    def open(self, topology: Topology, *, timeout_s: float) -> Groups:
        """Return the groups of a topology; every rank of the world calls it at the same point.

        A collective in these groups fails after `timeout_s`; over NCCL later, and then it ends the
        process.
        """
        for other in (*self._ahead, topology):
            if other.length not in self._built:
                start = time.perf_counter()
                if not self._ahead:
                    self.close()
                self._built[other.length] = build_groups(
                    other,
                    self._rank,
                    on_cuda=self._on_cuda,
                    timeout_s=self._timeout_s,
                    backend=self._backend,
                )
                if not self._ahead:
                    self.rebuild_s = time.perf_counter() - start
        groups = self._built[topology.length]
        groups.limit_waits(timeout_s * (_NCCL_PATIENCE if self._on_cuda else 1.0))
        return groups

    def close(self) -> None:
        for groups in self._built.values():
            groups.destroy()
        self._built.clear()


def build_groups(
    topology: Topology, rank: int, *, on_cuda: bool, timeout_s: float, backend: str | None = None
) -> Groups:
    """Build the groups of a topology; every rank of the world calls it at the same point."""
    stages = [topology.stage_ranks(stage) for stage in range(topology.length)]
    stage = _own_group(stages, rank, timeout_s, backend)
    forward = _own_group(topology.pipelines, rank, timeout_s, backend)
    if not on_cuda:
        return Groups(forward, forward, stage)
    # A spare is in no group, yet `new_group` needs every rank of the world.
    backward = _own_group(topology.pipelines, rank, timeout_s, backend)
    device = torch.device("cuda")
    every = tuple(range(topology.num_ranks))
    everyone = stage if stages == [every] else _own_group([every], rank, timeout_s, backend)
    groups = Groups(forward, backward, stage, everyone)
    for group in dict.fromkeys((stage, everyone)):
        if group is not None:
            # NCCL blocks in a group's first sum; a replica without samples would join it late.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    if forward is None:
        return groups
    replica = topology.replica_of(rank)
    layers = [topology.stage_of_replica(replica, stage) for stage in range(topology.length)]
    ways = [way for below, above in pairwise(layers) for way in product(below, above)]
    for way in ways:
        open_links(way, rank, group=forward, device=device)
    for way in reversed(ways):
        open_links(way[::-1], rank, group=backward, device=device)
    return groups


def open_links(
    ranks: Sequence[int], rank: int, *, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Pass one number from each rank to the next, first link first.

    NCCL builds a link's communicator at its first message, and both ends block meanwhile. In the
    schedule a stage that posts a receive early would block before it sends what its peer needs.
    """
    number = torch.zeros(1, device=device)
    for source, destination in pairwise(ranks):
        if rank == source:
            dist.send(number, destination, group=group)
        elif rank == destination:
            dist.recv(number, source, group=group)


def _own_group(
    members: Sequence[tuple[int, ...]], rank: int, timeout_s: float, backend: str | None
) -> dist.ProcessGroup | None:
    """Create a group for each list of members, in order on every rank; return this rank's."""
    group_here = None
    for ranks in members:
        if len(ranks) > 1:
            limit = timedelta(seconds=timeout_s)
            group = dist.new_group(list(ranks), timeout=limit, backend=backend)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                group_here = group
    return group_here

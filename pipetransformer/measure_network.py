"""Time the world's links and its sums of gradients, as training uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from autodp import GradientReducer, Topology, allowed_lengths, broadcast_json, gather_json
from autopipe import AllReduceCost, LinkCost
from pipetransformer.world import World

_PROBE_BYTES = 1 << 20
_ISSUED_BYTES = 1 << 16
_SUM_BYTES = (1 << 12, 1 << 18, 1 << 22, 25 << 20)
"""Sizes at which sums are timed; beyond the last, a bucket's, they cost in proportion."""

_FREE = LinkCost(0.0, float(1 << 40))


def measure_links(world: World) -> tuple[LinkCost, LinkCost]:
    """Time messages within a node, and between two; all links of a kind count as equal.

    Ranks exchange messages in pairs, all at once, as stages do; rank 0's times count. Where one of
    the kinds does not occur, the other's cost stands for it. Collective.
    """
    slots = world.slots_per_node
    within = _measure_link(world, 1) if slots > 1 and world.size > 1 else None
    between = _measure_link(world, slots) if world.size > slots else None
    return within or between or _FREE, between or within or _FREE


def measure_sums(world: World, num_bytes: int, *, timeout_s: float) -> tuple[AllReduceCost, ...]:
    """Time sums over the replicas of a stage, for every number of them that the world allows.

    All stages sum at once, as they do in training.

    Args:
        world: the ranks.
        num_bytes: largest sum that can occur.
        timeout_s: limit of a wait.
    """
    sizes = [size for size in _SUM_BYTES if size < num_bytes] + [min(num_bytes, _SUM_BYTES[-1])]
    sizes = sorted({max(4, size) for size in sizes})
    costs = []
    for length in reversed(allowed_lengths(world.size, world.slots_per_node)):
        replicas = world.size // length
        if replicas > 1:
            with _stage_group(world, length, timeout_s) as group:
                seconds = tuple(_sum_s(world, group, size) for size in sizes)
            costs.append(AllReduceCost(replicas, tuple(sizes), seconds))
    return tuple(costs)


def measure_agreement(world: World) -> float:
    """Return the seconds of a sum of two numbers over the world, of which a step has two."""
    if world.group is None:
        return 0.0
    numbers = torch.zeros(2, dtype=torch.float64)
    return least_s(lambda: dist.all_reduce(numbers, group=world.group))


def least_s(action: Callable[[], object], *, repeats: int = 10) -> float:
    """Return the least seconds of an action's repeats, after one to warm up.

    On a machine that others use, too, medians of so few differ threefold between two runs.
    """
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _measure_link(world: World, distance: int) -> LinkCost:
    """Time messages, there and back, between each rank and the one at a distance above it."""
    position = world.rank % (2 * distance)
    is_lower = position < distance
    peer = world.rank + (distance if is_lower else -distance)
    values: list[float] = []
    if peer < world.size:
        small_s, large_s = (
            least_s(lambda n=n: _ping(world, peer, n, begins=is_lower)) / 2  # type: ignore[misc]
            for n in (1, _PROBE_BYTES)
        )
        rate = _PROBE_BYTES / max(large_s - small_s, 1e-9)
        values = [small_s, rate, _handing_over_s(world, peer, begins=is_lower)]
    return LinkCost(*broadcast_json(values, group=world.group))


def _ping(world: World, peer: int, num_bytes: int, *, begins: bool) -> None:
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    for sends in (begins, not begins):
        (dist.send if sends else dist.recv)(payload, peer, group=world.group)


def _handing_over_s(world: World, peer: int, *, begins: bool) -> float:
    """Return the seconds that issuing a message takes, not waiting for its arrival."""
    payload = torch.zeros(_ISSUED_BYTES, dtype=torch.uint8, device=world.device)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        if not begins:
            dist.recv(payload, peer, group=world.group)
            continue
        work = dist.isend(payload, peer, group=world.group)
        seconds.append(time.perf_counter() - start)
        assert work is not None
        work.wait()
    return min(seconds) if begins else 0.0


@contextmanager
def _stage_group(world: World, length: int, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Lend the group of this rank's stage at a pipeline length."""
    if length == 1:
        assert world.group is not None
        yield world.group
        return
    topology = Topology(world.size, world.slots_per_node, length)
    timeout = timedelta(seconds=timeout_s)
    groups = [
        dist.new_group(list(topology.stage_ranks(stage)), timeout=timeout)
        for stage in range(length)
    ]
    own = groups[topology.stage_of(world.rank)]
    assert isinstance(own, dist.ProcessGroup)
    try:
        yield own
    finally:
        # A rank that left early would close connections that others still make.
        gather_json(None, group=world.group)
        dist.destroy_process_group(own)


def _sum_s(world: World, group: dist.ProcessGroup, num_bytes: int) -> float:
    """Time what a stage does with gradients of so many bytes: copy, sum, and put in place."""
    parameter = nn.Parameter(torch.zeros(num_bytes // 4, device=world.device))
    reducer = GradientReducer([parameter], group)

    def reduce() -> None:
        parameter.grad = torch.zeros_like(parameter)
        reducer.finish()

    try:
        return least_s(reduce, repeats=5)
    finally:
        reducer.close()

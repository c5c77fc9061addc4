"""Time the world's links and its sums of gradients, as training uses them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import GradientReducer, Topology, broadcast_json, gather_json
from autopipe.plan import fitting_lengths
from autopipe.profile import AllReduceCost, LinkCost, quartiles, with_tuples
from pipetransformer.measure.timing import repeats_s, typical_s
from pipetransformer.processes import World

_PROBE_BYTES = 1 << 20
_TURNS = 9
_SUM_BYTES = (1 << 12, 1 << 18, 1 << 22, 25 << 20)
"""Sizes at which sums are timed; beyond the last, a bucket's, they cost in proportion."""

_FREE = LinkCost(0.0, float(1 << 40))


def measure_messages(world: World, work: Callable[[], object]) -> dict[str, Any]:
    """Time messages, and return them under the names of `Profile`'s fields. Collective.

    Ranks exchange messages in pairs, all at once, as stages do. Rank 0's times stand for all links
    of a kind, and for the other kind where that does not occur.

    Args:
        work: computes as a stage does, for a few milliseconds.
    """
    if world.group is None:
        return {"link": _FREE, "node_link": _FREE, "step_overhead_s": 0.0}
    work_s, slots = typical_s(work, repeats=_TURNS), world.slots_per_node
    within = _measure_link(world, 1, work, work_s) if slots > 1 and world.size > 1 else None
    between = _measure_link(world, slots, work, work_s) if world.size > slots else None
    return {
        "link": within or between or _FREE,
        "node_link": between or within or _FREE,
        # Ranks agree twice a step.
        "step_overhead_s": 2 * _agreement_s(world, work, work_s),
    }


def measure_sums(world: World, num_bytes: int, *, timeout_s: float) -> tuple[AllReduceCost, ...]:
    """Time sums over the replicas of a stage, for every number of replicas that the world allows.

    All stages sum at once, as in training. Collective.

    Args:
        num_bytes: largest sum that can occur.
        timeout_s: limit of a wait.
    """
    sizes = [size for size in _SUM_BYTES if size < num_bytes] + [min(num_bytes, _SUM_BYTES[-1])]
    sizes = sorted({max(4, size) for size in sizes})
    costs = []
    for length in reversed(fitting_lengths(world.size, world.slots_per_node)):
        replicas = world.size // length
        if replicas > 1:
            with _stage_group(world, length, timeout_s) as group:
                taken = [_sums_s(world, group, size) for size in sizes]
            seconds = tuple(map(statistics.median, taken))
            # Most gradients are summed in buckets of the largest size.
            costs.append(AllReduceCost(replicas, tuple(sizes), seconds, quartiles(taken[-1])))
    return tuple(costs)


def _agreement_s(world: World, work: Callable[[], object], work_s: float) -> float:
    """Return the seconds of a sum of two numbers over the world.

    Ranks come to it from their work, some earlier than others.
    """
    numbers = torch.zeros(2, dtype=torch.float64)

    def work_and_agree() -> None:
        work()
        dist.all_reduce(numbers, group=world.group)

    return max(0.0, typical_s(work_and_agree, repeats=_TURNS) - work_s)


def _measure_link(
    world: World, distance: int, work: Callable[[], object], work_s: float
) -> LinkCost:
    """Time messages, there and back, between each rank and the rank at a distance above it."""
    position = world.rank % (2 * distance)
    is_lower = position < distance
    peer = world.rank + (distance if is_lower else -distance)
    cost = None
    if peer < world.size:
        turn = partial(_turn, world, peer, begins=is_lower)
        pings = [repeats_s(partial(turn, num), repeats=_TURNS) for num in (1, _PROBE_BYTES)]
        small_s, large_s = (statistics.median(taken) / 2 for taken in pings)
        rate = _PROBE_BYTES / max(large_s - small_s, 1e-9)
        turn_s = typical_s(partial(turn, 1, work=work), repeats=_TURNS)
        # A message also costs both ends time: to handle it, to wake up, and to compute with caches
        # that have gone cold.
        overhead_s = max(0.0, turn_s / 2 - work_s - small_s) / 2
        cost = LinkCost(small_s, rate, overhead_s, quartiles(pings[0]))
    agreed = broadcast_json(cost and asdict(cost), group=world.group)
    return LinkCost(**with_tuples(agreed))


def _turn(
    world: World,
    peer: int,
    num_bytes: int,
    *,
    begins: bool,
    work: Callable[[], object] | None = None,
) -> None:
    """Pass a message there and back; each end does its work, if any, before it sends."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)
    for sends in (begins, not begins):
        if sends and work is not None:
            work()
        _pass(world, payload, peer, sends=sends)


def _pass(world: World, payload: Tensor, peer: int, *, sends: bool) -> None:
    """Send from this rank's device, or receive there, by way of host memory where links do."""
    message = payload.to(world.link_device)
    (dist.send if sends else dist.recv)(message, peer, group=world.group)
    if not sends and message is not payload:
        payload.copy_(message)


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
        dist.new_group(list(topology.stage_ranks(stage)), timeout=timeout, backend=world.backend)
        for stage in range(length)
    ]
    group = groups[topology.stage_of(world.rank)]
    assert isinstance(group, dist.ProcessGroup)
    try:
        yield group
    finally:
        # A barrier: a rank that left early would close connections that others still make.
        gather_json(None, group=world.group)
        dist.destroy_process_group(group)


def _sums_s(world: World, group: dist.ProcessGroup, num_bytes: int) -> list[float]:
    """Time a stage's sum of gradients of a size: copy, sum, and put in place."""
    parameter = nn.Parameter(torch.zeros(num_bytes // 4, device=world.device))
    ranks = dist.get_process_group_ranks(group)
    on_one_node = world.topology(1).is_on_one_node(ranks)
    reducer = GradientReducer([parameter], group, on_one_node=on_one_node)
    gradient = torch.zeros_like(parameter)

    def have_gradient() -> None:
        parameter.grad = gradient

    try:
        return repeats_s(reducer.finish, repeats=_TURNS, before=have_gradient)
    finally:
        reducer.close()

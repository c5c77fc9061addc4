"""Measure, on the live devices and before training, what the planner needs to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autodp import broadcast_json, gather_json
from autopipe import LinkCost, Profile, ProfiledSublayer, merge_profiles, profile_sublayers
from pipetransformer.data import Batch
from pipetransformer.optimizer_state import take_state
from pipetransformer.stage import Task, trained_parameters
from pipetransformer.world import World

_PROBE_BYTES = 1 << 20
_REPEATS = 10


@dataclass(frozen=True)
class Measurements:
    """Hold the profile, and the rate at which a cached row can be read."""

    profile: Profile
    copy_bytes_per_s: float


def measure(task: Task, world: World, read: Callable[[Tensor], Batch]) -> Measurements:
    """Measure sublayers, optimizer, links and memory; every rank measures, all get the medians.

    Args:
        task, world: what is trained, and where.
        read: reads samples of the training set.
    """
    # Start together: the ranks of a node slow each other down.
    gather_json(None, group=world.group)
    # Far beyond the largest measured size a prediction would be a guess.
    largest = min(max(task.config.batch_size // 2, 1), 32)
    sizes = tuple(sorted({max(1, largest // 4), largest}))
    batches = [_on(world.device, read(torch.arange(size))) for size in sizes]
    task.model.model.to(world.device)
    sublayers = [ProfiledSublayer(sub.name, sub.layer, sub.module, _caller(task, index))
                 for index, sub in enumerate(task.model.sublayers)]
    costs = profile_sublayers(sublayers, batches)
    optimizer_s_per_byte, state_ratio = _measure_optimizer(task)
    task.model.model.to("cpu")
    link, all_reduce = _measure_link(world), _measure_all_reduce(world)
    own = Profile(batch_sizes=sizes, sublayers=costs, optimizer_s_per_byte=optimizer_s_per_byte,
                  state_bytes_ratio=state_ratio, step_overhead_s=2 * all_reduce.latency_s,
                  link=link, all_reduce=all_reduce)
    gathered = gather_json([own.to_json(), _measure_copy()], group=world.group)
    merged = merge_profiles([Profile.from_json(values) for values, _ in gathered])
    rate = sorted(rate for _, rate in gathered)[len(gathered) // 2]
    values = broadcast_json([merged.to_json(), rate], group=world.group)
    return Measurements(Profile.from_json(values[0]), values[1])


def _on(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _caller(task: Task, index: int) -> Callable[[Tensor | None, Mapping[str, Tensor]], Tensor]:
    def call(hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        return task.model.call(index, batch if hidden is None else hidden, sides=batch)
    return call


def _measure_optimizer(task: Task) -> tuple[float, float]:
    """Return seconds of a step per parameter byte, and state bytes per parameter byte.

    Steps are taken on copies of one sublayer's parameters, under their names, so that nothing is
    changed.
    """
    candidates = (trained_parameters(task, range(index, index + 1))
                  for index in range(len(task.model.sublayers)))
    largest = max(candidates, key=lambda found: sum(p.nbytes for p in found.values()))
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in largest.items()}
    if not copies:
        return 0.0, 0.0
    optimizer = task.optimizer(list(copies.items()))
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    seconds = _least_s(optimizer.step)
    num_bytes = sum(p.nbytes for p in copies.values())
    state_bytes = sum(t.nbytes for t in take_state(optimizer, copies).values())
    return seconds / num_bytes, state_bytes / num_bytes


def _measure_link(world: World) -> LinkCost:
    """Time messages between ranks 0 and 1, there and back; all links of a node count as equal."""
    if world.group is None:
        return LinkCost(0.0, float(1 << 40))

    def ping(num_bytes: int) -> Callable[[], None]:
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device=world.device)

        def exchange() -> None:
            if world.rank == 0:
                dist.send(payload, 1, group=world.group)
                dist.recv(payload, 1, group=world.group)
            elif world.rank == 1:
                dist.recv(payload, 0, group=world.group)
                dist.send(payload, 0, group=world.group)
        return exchange

    return _cost(_least_s(ping(1)) / 2, _least_s(ping(_PROBE_BYTES)) / 2, _PROBE_BYTES)


def _measure_all_reduce(world: World) -> LinkCost:
    """Time sums over the world; the rate is that of the 2 (N - 1) / N bytes each worker sends."""
    if world.group is None:
        return LinkCost(0.0, float(1 << 40))
    small, large = (torch.zeros(size, device=world.device) for size in (1, _PROBE_BYTES // 4))
    seconds = [_least_s(lambda t=tensor: dist.all_reduce(t, group=world.group))  # type: ignore[misc]
               for tensor in (small, large)]
    traffic = 2 * (world.size - 1) / world.size * _PROBE_BYTES
    return _cost(seconds[0], seconds[1], traffic)


def _cost(small_s: float, large_s: float, num_bytes: float) -> LinkCost:
    return LinkCost(small_s, num_bytes / max(large_s - small_s, 1e-9))


def _measure_copy() -> float:
    """Return the bytes per second at which rows are read from memory and summed, as a check is."""
    rows = torch.zeros(256, 1 << 13, dtype=torch.int64)
    # A generator of its own leaves the caller's random numbers as they were.
    index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:64]
    seconds = _least_s(lambda: rows.index_select(0, index).sum(1))
    return len(index) * rows[0].nbytes / seconds


def _least_s(action: Callable[[], object]) -> float:
    """Return the least seconds of an action's repeats: what it takes when nothing disturbs it."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])

"""Choose what a Trainer finds when it measures: each sublayer, link and cache costs what a test
says, or what was found before, which spares it half of a short run's time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from autopipe.profile.network import LinkCost
from autopipe.profile.profile import Profile, SublayerCost
from pipetransformer.job import Task
from pipetransformer.measure.measurements import Measurements, measure
from pipetransformer.processes.world import World
from pipetransformer.transition import transitions as steering
from tests.costs import FREE, sums

NO_TIME = 1e18
"""Bytes a second of what costs nothing."""

_MEASURED: dict[tuple[Any, ...], Measurements] = {}


@contextmanager
def measuring(how: Callable[..., Measurements]) -> Iterator[None]:
    """Let the Trainers inside measure so; `measure` itself is what they do elsewhere."""
    with mock.patch.object(steering, "measure", how):
        yield


def freely(*arguments: Any, **options: Any) -> Measurements:
    """Measure, but find that a cache costs nothing."""
    free = {"cache_bytes_per_s": NO_TIME, "cache_write_bytes_per_s": NO_TIME}
    return dataclasses.replace(measure(*arguments, **options), **free)


def once(task: Task, world: World, *arguments: Any, **options: Any) -> Measurements:
    """Measure freely, each model and cluster once in this process."""
    tensors = (*task.model.model.named_parameters(), *task.model.model.named_buffers())
    shapes = tuple((name, t.shape, t.dtype, name in task.trainable) for name, t in tensors)
    key = (shapes, world.size, world.slots_per_node)
    if key not in _MEASURED:
        _MEASURED[key] = freely(task, world, *arguments, **options)
    return _MEASURED[key]


def never(task: Task, *_: Any, **__: Any) -> Measurements:
    """Give every sublayer one cost; reading a cache costs nothing."""
    costs = tuple(
        SublayerCost(one.name, one.layer, *[(1e-3,)] * 4, *[64] * 4, 64.0, 64.0)
        for one in task.model.sublayers
    )
    free = LinkCost(FREE.latency_s, NO_TIME)
    profile = Profile((1,), costs, 0.0, 0.0, 0.0, free, free, sums(bytes_per_s=NO_TIME))
    return Measurements(profile, cache_bytes_per_s=NO_TIME)

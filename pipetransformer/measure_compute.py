"""Time the sublayers and the optimizer on all ranks at once, and on one while the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from autodp import gather_json
from autopipe import MeasuredChain, ProfiledSublayer, time_rounds
from freeze import GradientSignals
from pipetransformer.data import Batch
from pipetransformer.optimizer_state import take_state
from pipetransformer.task import Task, trained_parameters
from pipetransformer.timing import Displacer, typical_s
from pipetransformer.world import World

_UPDATED_BYTES = 64 << 20
"""Parameters on which an update is timed: with gradients and state far beyond a cache's size."""


def measure_company(
    sublayers: Sequence[ProfiledSublayer],
    batches: Sequence[Batch],
    chain: MeasuredChain,
    world: World,
) -> tuple[tuple[float, ...], float]:
    """Measure what it costs to compute side by side; every rank gets the same. Collective.

    A step sums many times, so that their mean counts and not their median, and its ranks wait for
    the slowest of them. On a machine of its own both hardly matter; where others compute, too,
    they add a tenth. A stage that computes while the others wait escapes this, and has the node's
    caches and memory to itself besides: the first rank of each node is timed so.

    Returns:
        how much longer than the chain's medians all ranks' computing takes in a step, for every
        size; and what computing takes on an otherwise idle node, as a share of that.
    """
    gathered = gather_json([chain.rounds_s, chain.median_s()], group=world.group)
    rounds_s, medians_s = zip(*gathered, strict=True)
    usual_s = list(map(statistics.median, zip(*medians_s, strict=True)))
    slowest_s = [
        list(map(max, zip(*(rounds[size] for rounds in rounds_s), strict=True)))
        for size in range(len(batches))
    ]
    lengthening = tuple(
        max(1.0, statistics.mean(slowest) / max(usual, 1e-9))
        for slowest, usual in zip(slowest_s, usual_s, strict=True)
    )
    if world.slots_per_node == 1 or world.size == 1:
        return lengthening, 1.0
    alone_s = None
    if world.rank % world.slots_per_node == 0:
        alone_s = time_rounds(sublayers, batches, repeats=max(3, len(chain.rounds_s[0]) // 2))
    share = statistics.median(
        sum(map(statistics.mean, one_s)) / max(sum(map(statistics.mean, slowest_s)), 1e-9)
        for one_s in gather_json(alone_s, group=world.group)
        if one_s is not None
    )
    return lengthening, min(1.0, share)


def measure_update(task: Task) -> tuple[float, float]:
    """Return seconds of an update per parameter byte, and state bytes per parameter byte.

    An update measures the gradients and steps the optimizer. It is timed on copies of parameters
    under their names, so that nothing is changed.
    """
    copies: dict[str, dict[str, nn.Parameter]] = {}
    num_bytes = 0
    for index, sublayer in enumerate(task.model.sublayers):
        own = trained_parameters(task, range(index, index + 1))
        if own and num_bytes < _UPDATED_BYTES:
            copies[sublayer.name] = {n: nn.Parameter(p.detach().clone()) for n, p in own.items()}
            num_bytes += sum(p.nbytes for p in own.values())
    if not copies:
        return 0.0, 0.0
    named = {name: p for own in copies.values() for name, p in own.items()}
    optimizer = task.optimizer(list(named.items()))
    signals = GradientSignals({name: list(own.values()) for name, own in copies.items()})
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        float(signals.squared_norm(None))
        optimizer.step()

    seconds = typical_s(update, repeats=5, before=Displacer())
    state_bytes = sum(t.nbytes for t in take_state(optimizer, named).values())
    return seconds / num_bytes, state_bytes / num_bytes

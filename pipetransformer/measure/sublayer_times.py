"""Time the sublayers and the optimizer on all ranks at once, and on one while the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from autodp import gather_json
from autopipe.profile import MeasuredChain, ProfiledSublayer, time_rounds
from freeze.signals import IntervalSignals
from pipetransformer.feed import Batch
from pipetransformer.measure.timing import displacer, typical_s
from pipetransformer.model import Task, take_state, trained_parameters
from pipetransformer.processes import World

_UPDATED_BYTES = 64 << 20
"""Parameters on which an update is timed: with gradients and state far beyond a cache's size."""


def time_alone(
    sublayers: Sequence[ProfiledSublayer], batches: Sequence[Batch], *, world: World, repeats: int
) -> float | None:
    """Time sublayers again, on the first rank of each node while the others wait. Collective.

    Returns:
        the median of the repeats; None on the other ranks, and where a node has no others.
    """
    if world.slots_per_node == 1 or world.size == 1:
        return None
    gather_json(None, group=world.group)
    alone_s = None
    if world.rank % world.slots_per_node == 0:
        rounds_s = time_rounds(sublayers, batches, repeats=repeats)
        alone_s = sum(map(statistics.median, rounds_s))
    gather_json(None, group=world.group)
    return alone_s


def measure_company(chain: MeasuredChain, alone_s: Sequence[float | None], world: World) -> float:
    """Return what computing takes on an otherwise idle node, as a share of what it takes in
    company; the same on every rank. Collective.

    A stage that computes while the others wait has the node's caches and memory to itself: the
    first rank of each node is timed so.

    Args:
        chain: this rank's times beside the others.
        alone_s: its times alone, of the chain's spans at the largest size, from `time_alone`.
        world: the ranks.
    """
    gathered = gather_json([chain.rounds_s[-1], list(alone_s)], group=world.group)
    # Ranks that train together wait for the slowest of them.
    slowest_s = map(max, zip(*(rounds for rounds, _ in gathered), strict=True))
    beside_s = statistics.median(slowest_s)
    shares = [sum(spans) / max(beside_s, 1e-9) for _, spans in gathered if None not in spans]
    return min(1.0, statistics.median(shares or [1.0]))


def measure_update(task: Task, device: torch.device) -> tuple[float, float]:
    """Return seconds of an update per parameter byte, and state bytes per parameter byte.

    An update measures the gradients and steps the optimizer. It is timed on parameters of the same
    names and shapes, so that nothing is changed.
    """
    # The parameters, their gradients and mostly two moments are to take half the limit at most.
    limit = task.config.memory_limit_bytes
    most_bytes = _UPDATED_BYTES if limit is None else min(_UPDATED_BYTES, limit // 8)
    copies: dict[str, dict[str, nn.Parameter]] = {}
    num_bytes = 0
    for index, sublayer in enumerate(task.model.sublayers):
        own = trained_parameters(task, (index,))
        if own and num_bytes < most_bytes:
            copies[sublayer.name] = {
                n: nn.Parameter(torch.zeros_like(p, device=device)) for n, p in own.items()
            }
            num_bytes += sum(p.nbytes for p in own.values())
    if not copies:
        return 0.0, 0.0
    named = {name: p for own in copies.values() for name, p in own.items()}
    optimizer = task.optimizer(list(named.items()))
    signals = IntervalSignals(copies, task.signals)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)

    def update() -> None:
        signals.begin_step()
        float(signals.squared_norm())
        signals.add_gradients()
        optimizer.step()

    seconds = typical_s(update, repeats=5, before=displacer())
    state_bytes = sum(t.nbytes for t in take_state(optimizer, named).values())
    kept = [t for name in copies for t in signals.tensors(name).values()]
    return seconds / num_bytes, (state_bytes + sum(t.nbytes for t in kept)) / num_bytes

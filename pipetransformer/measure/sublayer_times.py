"""Measure what sublayers cost beside computing in company: alone, in updates, in sums of rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn

from autodp import gather_json
from autopipe.profile import MeasuredChain, ProfiledSublayer, time_rounds
from freeze.signals import IntervalSignals
from pipetransformer.feed import Batch
from pipetransformer.measure.spans import forward, run_spans
from pipetransformer.measure.timing import displacer, typical_s
from pipetransformer.model import Task, large_embeddings, take_state, trained_parameters
from pipetransformer.processes import World

_UPDATED_BYTES = 64 << 20
"""Parameters on which an update is timed; far beyond a CPU cache's size."""


def time_alone(
    sublayers: Sequence[ProfiledSublayer], batches: Sequence[Batch], *, world: World, repeats: int
) -> float | None:
    """Time sublayers again, on the first rank of each node while the others wait. Collective.

    Returns:
        the median of the repeats; None on the other ranks, and on a node with a single rank.
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


def measure_company(timed: MeasuredChain, alone_s: Sequence[float | None], world: World) -> float:
    """Return the time of computing on an idle node, as a share of that in company. Collective.

    A stage that computes while the others wait has the node's caches and memory to itself.

    Args:
        timed: this rank's times beside the others.
        alone_s: its times alone, of the same spans at the largest size, from `time_alone`.
    Returns:
        a share up to 1, the same on every rank.
    """
    gathered = gather_json([timed.rounds_s[-1], list(alone_s)], group=world.group)
    # Ranks that train together wait for the slowest of them.
    slowest_s = map(max, zip(*(rounds for rounds, _ in gathered), strict=True))
    beside_s = statistics.median(slowest_s)
    shares = [sum(spans) / max(beside_s, 1e-9) for _, spans in gathered if None not in spans]
    return min(1.0, statistics.median(shares or [1.0]))


def measure_update(task: Task, device: torch.device) -> tuple[float, float]:
    """Return seconds of an update per parameter byte, and state bytes per parameter byte.

    An update measures the gradients and steps the optimizer. It is timed on copies with the same
    names and shapes.
    """
    # Parameters, gradients and two moments, as of Adam, then take at most half the limit.
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
    signal_tensors = [t for name in copies for t in signals.tensors(name).values()]
    return seconds / num_bytes, (state_bytes + sum(t.nbytes for t in signal_tensors)) / num_bytes


def untouched_bytes(
    task: Task, world: World, batch: Batch, spans: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return by index the bytes of sublayers' gradients that stay zeros in a global batch.

    Only large embeddings have such rows, and only on CPUs replicas leave them out of their sums.
    It is a lower bound: batches of this size are taken to have no row in common.
    """
    sublayers = task.model.sublayers
    tables = {i: large_embeddings(one.module, world.device) for i, one in enumerate(sublayers)}
    holders = [index for index, own in tables.items() if own]
    if not holders or world.size == 1:
        return {}
    touched: dict[nn.Module, set[int]] = {}

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        touched.setdefault(module, set()).update(given[0].unique().tolist())

    with ExitStack() as hooks:
        for table in chain.from_iterable(tables.values()):
            hooks.callback(table.register_forward_pre_hook(note).remove)
        # No further than the last embedding, which mostly is in the first sublayer.
        needed = [[i for i in span if i <= holders[-1]] for span in spans]
        run_spans(
            task,
            world.device,
            [span for span in needed if span],
            [batch],
            lambda subs, inputs: forward(subs, inputs[0]),
        )
    num_batches = task.config.global_batch_size / len(next(iter(batch.values())))
    return {
        index: sum(
            table.weight[0].nbytes * max(0.0, table.num_embeddings - num_batches * len(ids))
            for table in tables[index]
            if (ids := touched.get(table)) is not None
        )
        for index in holders
    }

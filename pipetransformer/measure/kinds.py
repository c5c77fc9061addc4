"""Choose the sublayers to time: all, or a few of each kind.

A Transformer's blocks are alike, so a large model is measured by some of its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from torch import nn

from autodp import broadcast_json, gather_json
from autopipe.profile import SublayerCost, chain_bytes
from pipetransformer.feed import Batch
from pipetransformer.measure.spans import run_spans
from pipetransformer.model import Task
from pipetransformer.processes import World

_WHOLE_S = 0.2
"""Seconds of a round beyond which only some sublayers of each kind are timed."""

_OF_A_KIND = 2


@dataclass(frozen=True)
class TimedSublayers:
    """Hold which sublayers are timed, for all of their kind.

    Args:
        everyone: all sublayers, with names, layers and bytes, without times.
        kinds: a number for each of them.
        timed: indices, ascending.
    """

    everyone: Sequence[SublayerCost]
    kinds: Sequence[int]
    timed: Sequence[int]

    def within(self, spans: Sequence[range]) -> tuple[tuple[int, ...], ...]:
        """Return the timed sublayers of each span that has any; of a few, each by itself."""
        if len(self.timed) < len(self.everyone):
            return tuple((index,) for index in self.timed)
        parts = (tuple(index for index in self.timed if index in span) for span in spans)
        return tuple(part for part in parts if part)

    def for_all(self, costs: Sequence[SublayerCost]) -> tuple[SublayerCost, ...]:
        """Return every sublayer's cost: the median of its kind.

        Args:
            costs: measured, of the timed sublayers.
        """
        measured = [f.name for f in fields(SublayerCost) if f.name[-2:] == "_s"] + ["spread"]
        cost_of_kind = [
            (self.kinds[index], cost) for index, cost in zip(self.timed, costs, strict=True)
        ]
        whole = []
        for kind, own in zip(self.kinds, self.everyone, strict=True):
            same = [cost for one, cost in cost_of_kind if one == kind]
            times: dict[str, Any] = {
                name: tuple(np.median([getattr(cost, name) for cost in same], axis=0).tolist())
                for name in measured
            }
            saved, output = same[0].saved_bytes, same[0].output_bytes
            whole.append(replace(own, **times, saved_bytes=saved, output_bytes=output))
        return tuple(whole)


def choose_sublayers(
    task: Task,
    world: World,
    cut: Callable[[int], Batch],
    spans_of: Mapping[int, Sequence[range]],
) -> TimedSublayers:
    """Choose the sublayers to time. Collective.

    All are timed if that is quick. A few compute in warmer caches, which live steps correct. They
    also hide that a sublayer is slower at one place than at another.
    """
    smallest = min(spans_of)
    spans, batch = spans_of[smallest], cut(smallest)
    gather_json(None, group=world.group)  # A barrier: all ranks compute at once, as in training.
    start = time.perf_counter()
    counted = run_spans(
        task, world.device, spans, [batch], lambda subs, inputs: chain_bytes(subs, inputs[0])
    )
    # These were forwards. Backwards, and forwards without gradients, take three times as long.
    own_s = 4 * (time.perf_counter() - start) / smallest
    sublayers, rows = task.model.sublayers, list(chain.from_iterable(counted))
    everyone = [
        SublayerCost(sublayer.name, sublayer.layer, (), (), (), (), optimizer_bytes=0, **row)
        for sublayer, row in zip(sublayers, rows, strict=True)
    ]
    every = tuple(range(len(sublayers)))
    kinds = kinds_of([sublayer.module for sublayer in sublayers], rows)
    # Ranks agree on the slowest one's time, so that all choose alike.
    round_s = max(gather_json(own_s, group=world.group)) * sum(spans_of)
    if round_s <= _WHOLE_S:
        return TimedSublayers(everyone, every, every)
    # Rank 0's kinds, too: what experts keep hangs on the weights, which are random elsewhere.
    told = [kinds, few_of(kinds, most=_OF_A_KIND)]
    kinds, few = broadcast_json(told, group=world.group)
    return TimedSublayers(everyone, kinds, few)


def kinds_of(modules: Sequence[nn.Module], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return a number for each sublayer, equal where modules, tensors and activations look equal.

    Args:
        modules: bottom first.
        rows: what `chain_bytes` has counted of each.
    """
    numbers: dict[Any, int] = {}
    kinds, below = [], 0.0
    for module, row in zip(modules, rows, strict=True):
        looks = (_looks_of(module), below, row["output_bytes"], row["saved_bytes"])
        kinds.append(numbers.setdefault(looks, len(numbers)))
        below = row["output_bytes"]
    return kinds


def few_of(kinds: Sequence[int], *, most: int) -> tuple[int, ...]:
    """Choose some sublayers of every kind that make a chain: each takes what the one below gives.

    Args:
        most: of a kind, unless the chain needs more.
    """
    chosen = {index for index, kind in enumerate(kinds) if list(kinds[:index]).count(kind) < most}
    while True:
        # Above a gap, the chain lacks the sublayer below unless one of its kind precedes.
        lacking = {
            above - 1
            for below, above in pairwise(sorted(chosen))
            if kinds[below] != kinds[above - 1]
        }
        if not lacking:
            return tuple(sorted(chosen))
        chosen |= lacking


def _looks_of(module: nn.Module) -> tuple[Any, ...]:
    parts = tuple((name, type(one), one.extra_repr()) for name, one in module.named_modules())
    tensors = (*module.named_parameters(), *module.named_buffers())
    return parts, tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)

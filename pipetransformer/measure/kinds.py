"""Choose the sublayers to measure: all, or of those that compute the same a few for all.

A Transformer's blocks are alike, and measuring each takes as many times longer as there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from torch import nn

from autodp import broadcast_json, gather_json
from autopipe.profile import SublayerCost, chain_bytes
from pipetransformer.feed import Batch
from pipetransformer.measure.stretches import run_spans
from pipetransformer.model import Task
from pipetransformer.processes import World

_WHOLE_S = 0.2
"""Seconds of a round beyond which not all sublayers are timed, but some of each kind."""

_OF_A_KIND = 2


def choose_sublayers(
    task: Task,
    world: World,
    cut: Callable[[int], Batch],
    spans_of: Mapping[int, Sequence[range]],
) -> tuple[list[SublayerCost], list[int], tuple[int, ...]]:
    """Return all sublayers without times, their kinds, and which of them to time. Collective.

    That is all where it can be done soon. Some of each kind compute in warmer caches, and hide
    that a sublayer is slower at one place than at another; live steps correct the former.
    """
    smallest = min(spans_of)
    spans, batch = spans_of[smallest], cut(smallest)
    gather_json(None, group=world.group)
    start = time.perf_counter()
    found = run_spans(
        task, world.device, spans, [batch], lambda subs, inputs: chain_bytes(subs, inputs[0])
    )
    # Forwards alone: with backwards, and once more without gradients, it takes four times as long.
    own_s = 4 * (time.perf_counter() - start) / smallest
    sublayers, rows = task.model.sublayers, list(chain.from_iterable(found))
    everyone = [
        SublayerCost(sublayer.name, sublayer.layer, (), (), (), (), optimizer_bytes=0, **row)
        for sublayer, row in zip(sublayers, rows, strict=True)
    ]
    every = tuple(range(len(sublayers)))
    kinds = kinds_of([sublayer.module for sublayer in sublayers], rows)
    round_s = max(gather_json(own_s, group=world.group)) * sum(spans_of)
    if round_s <= _WHOLE_S:
        return everyone, list(every), every
    few = few_of(kinds, most=_OF_A_KIND)
    return everyone, kinds, tuple(broadcast_json(few, group=world.group))


def within(spans: Sequence[range], chosen: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return what was chosen of each span, if anything was."""
    parts = (tuple(index for index in chosen if index in span) for span in spans)
    return tuple(part for part in parts if part)


def kinds_of(modules: Sequence[nn.Module], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return a number for each sublayer, equal where modules, tensors and activations look equal.

    Args:
        modules: the sublayers', bottom first.
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
        kinds: of all sublayers.
        most: of a kind, where the chain does not need more.
    """
    chosen = {index for index, kind in enumerate(kinds) if list(kinds[:index]).count(kind) < most}
    while True:
        lacking = {
            above - 1
            for below, above in pairwise(sorted(chosen))
            if kinds[below] != kinds[above - 1]
        }
        if not lacking:
            return tuple(sorted(chosen))
        chosen |= lacking


def given_to_all(
    costs: Sequence[SublayerCost],
    chosen: Sequence[int],
    *,
    kinds: Sequence[int],
    everyone: Sequence[SublayerCost],
) -> tuple[SublayerCost, ...]:
    """Return every sublayer's cost: the median of those of its kind.

    Args:
        costs: measured, of the sublayers chosen.
        chosen: their indices.
        kinds: of all sublayers.
        everyone: all sublayers, with names, layers and bytes of weights, gradients and buffers.
    """
    measured = [f.name for f in fields(SublayerCost) if f.name[-2:] == "_s"] + ["spread"]
    whole = []
    for kind, own in zip(kinds, everyone, strict=True):
        same = [cost for index, cost in zip(chosen, costs, strict=True) if kinds[index] == kind]
        times: dict[str, Any] = {
            name: tuple(np.median([getattr(cost, name) for cost in same], axis=0).tolist())
            for name in measured
        }
        saved, output = same[0].saved_bytes, same[0].output_bytes
        whole.append(replace(own, **times, saved_bytes=saved, output_bytes=output))
    return tuple(whole)


def _looks_of(module: nn.Module) -> tuple[Any, ...]:
    parts = tuple((name, type(one), one.extra_repr()) for name, one in module.named_modules())
    tensors = (*module.named_parameters(), *module.named_buffers())
    return parts, tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)

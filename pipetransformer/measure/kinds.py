"""Tell which sublayers compute the same, so that a few of them are measured for all.

A Transformer's blocks are alike, and measuring each takes as many times longer as there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from autopipe.profile import SublayerCost


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


def spread(
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
    measured = [f.name for f in fields(SublayerCost) if f.name[-2:] == "_s"]
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

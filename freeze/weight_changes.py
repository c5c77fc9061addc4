"""Measure how far weights move between two decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn


@final
class WeightChanges:
    """Compare each layer's weights with what they were when an interval began.

    Holds a copy of the weights that train, and costs nothing within the interval.

    Args:
        layers: parameters of each layer; those that do not train are left out.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]]) -> None:
        self._layers = [[p for p in dict.fromkeys(own) if p.requires_grad] for own in layers]
        self._before: list[list[Tensor]] = []
        self._num_steps = 0
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Start an interval."""
        self._before = [[p.detach().clone() for p in own] for own in self._layers]
        self._num_steps = 0

    def count_step(self) -> None:
        """Note that weights were updated."""
        self._num_steps += 1

    @torch.no_grad()
    def relative(self) -> tuple[float | None, ...]:
        """Return each layer's change over its norm, per step; waits for the device, once.

        None is for a layer without weights that train, or without steps.
        """
        sums = [
            torch.stack([_squares(own, before, part) for part in (True, False)])
            for own, before in zip(self._layers, self._before, strict=True)
            if own
        ]
        if not sums or not self._num_steps:
            return (None,) * len(self._layers)
        device = sums[0].device
        values = iter(torch.stack([one.to(device) for one in sums]).tolist())
        found: list[float | None] = []
        for own in self._layers:
            if not own:
                found.append(None)
                continue
            moved, size = next(values)
            found.append(math.sqrt(moved / size) / self._num_steps if size else math.inf)
        return tuple(found)


def _squares(own: Sequence[Tensor], before: Sequence[Tensor], moved: bool) -> Tensor:
    """Return the sum of squares of how far tensors moved, or of what they were; float64."""
    parts = [
        (p - b if moved else b).float().square().sum().double()
        for p, b in zip(own, before, strict=True)
    ]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()

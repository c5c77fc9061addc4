"""Measure how far weights move, and what gradients add up to, between two decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

Parameters = Mapping[str, Mapping[str, nn.Parameter]]
"""Parameters by owner, a sublayer or a layer, and name."""


def relative_update(moved: float | None, size: float | None, *, num_steps: int) -> float | None:
    """Return the norm of the weights' change over their norm, per step; None if not known.

    `moved` and `size` are the squared norms of the change, and of the weights before.
    """
    if moved is None or not size:
        return None
    update = math.sqrt(moved / size) / num_steps
    return update if math.isfinite(update) else None


def _whole(tensor: Tensor) -> Tensor:
    """Return a sum over all ranks, where `fully_shard` has parted what was summed. Collective."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


class KeptTensors:
    """Keep a tensor beside each parameter that trains; a tied one counts for its first owner."""

    def __init__(self, parameters: Parameters) -> None:
        first: dict[nn.Parameter, str] = {}
        for owner, own in parameters.items():
            for parameter in own.values():
                first.setdefault(parameter, owner)
        self._parameters = {
            owner: {n: p for n, p in own.items() if p.requires_grad and first[p] == owner}
            for owner, own in parameters.items()
        }
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def reset(self) -> None:
        self.tensors = {}

    def put(self, owner: str, tensors: Mapping[str, Tensor]) -> None:
        """Continue with an owner's tensors."""
        own = self._parameters[owner]
        if tensors:
            self.tensors[owner] = {n: t.to(own[n].device) for n, t in tensors.items() if n in own}

    def _add_up(self, rows: Mapping[str, list[list[Tensor]]]) -> dict[str, list[float]]:
        """Add up each of an owner's lists of 0-dim tensors; waits for the device, once."""
        sums = [
            _whole(torch.stack([one.double() for one in numbers]).sum())
            for own in rows.values()
            for numbers in own
        ]
        values = iter(torch.stack(sums).tolist() if sums else [])
        return {owner: [next(values) for _ in own] for owner, own in rows.items()}


@final
class WeightChanges(KeptTensors):
    """Compare weights with what they were when the interval began."""

    @torch.no_grad()
    def begin(self) -> None:
        """Begin an interval unless one is under way."""
        for owner, own in self._parameters.items():
            if owner not in self.tensors and own:
                self.tensors[owner] = {n: p.detach().clone() for n, p in own.items()}

    @torch.no_grad()
    def squares(self) -> dict[str, list[float]]:
        """Return the squared norms of each owner's change, and of its weights before."""
        rows: dict[str, list[list[Tensor]]] = {}
        for owner, before in self.tensors.items():
            own = self._parameters[owner]
            moved = [(own[n] - t).float().square().sum() for n, t in before.items()]
            rows[owner] = [moved, [t.float().square().sum() for t in before.values()]]
        return self._add_up(rows)


@final
class GradientSums(KeptTensors):
    """Add up the gradients of an interval's steps, as tensors."""

    @torch.no_grad()
    def add(self, scale: float) -> None:
        sums, gradients = [], []
        for owner, own in self._parameters.items():
            if own and owner not in self.tensors:
                # At least float32: half precision loses small gradients beside a large sum.
                self.tensors[owner] = {
                    n: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                    for n, p in own.items()
                }
            for name, parameter in own.items():
                if parameter.grad is not None:
                    sums.append(self.tensors[owner][name])
                    gradients.append(parameter.grad)
        if sums:
            torch._foreach_add_(sums, gradients, alpha=scale)

    def absolute(self) -> dict[str, float]:
        rows = {o: [[t.abs().sum() for t in own.values()]] for o, own in self.tensors.items()}
        return {owner: total for owner, (total,) in self._add_up(rows).items()}

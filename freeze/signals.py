"""Measure gradient norms while training, without waiting for the device.

Squares of disjoint parameters add, so a layer's norm follows from its sublayers', wherever those
live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class GradientSignals:
    """Accumulate the squared gradient norm of each sublayer over the steps of an interval.

    Call `squared_norm` once per step on the reduced, unscaled, unclipped gradients. All sums over
    tensors and steps are float64.

    Args:
        parameters: each sublayer's parameters by the sublayer's name, all on one device. A tied
            parameter counts in the first sublayer that lists it, so that the total is the norm of
            the whole gradient.
    """

    def __init__(self, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._names = tuple(parameters)
        distinct = {p: name for name in reversed(self._names) for p in parameters[name]}
        self._parameters = [
            [p for p in dict.fromkeys(own) if distinct[p] == name]
            for name, own in parameters.items()
        ]
        device = next((p.device for p in distinct), torch.device("cpu"))
        # Adds the tensors' squares up by sublayer; each tensor belongs to one.
        sizes = torch.tensor([len(own) for own in self._parameters], dtype=torch.int64)
        rows = torch.arange(len(self._names)).repeat_interleave(sizes)
        columns = torch.arange(len(rows))
        self._members = torch.zeros(len(self._names), len(rows), dtype=torch.float64)
        self._members[rows, columns] = 1
        self._members = self._members.to(device)
        self._zero = torch.zeros((), device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        # (sublayers + 1): the squared norms' sums, then the number of steps in them. One tensor,
        # so that one copy to the host reads all of it.
        self._sums = torch.zeros(len(self._names) + 1, dtype=torch.float64, device=device)

    @torch.no_grad()
    def squared_norm(self, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return this step's squared gradient norm, and accumulate it by sublayer if finite.

        Nothing here waits for the device. A parameter without gradient counts 0.

        Args:
            reduce: adds the stages' totals up; a step that is not finite on one stage is then left
                out on all of them. None: this process holds the whole model.
        Returns:
            0-dim float64 on the parameters' device (CPU if there are none): the total, NaN or
            infinite if any gradient is.
        """
        parameters = chain.from_iterable(self._parameters)
        squares = [self._zero if p.grad is None else _square(p.grad) for p in parameters]
        joined = torch.stack(squares).double() if squares else self._one.new_empty(0)
        total = joined.sum()
        if reduce is not None:
            total = reduce(total)
        step = torch.cat([self._members @ joined, self._one[None]])
        self._sums += step.masked_fill(~torch.isfinite(total), 0.0)
        return total

    def collect(self) -> dict[str, float]:
        """Return each sublayer's mean since the last `reset`; {} if no step was finite."""
        num_steps, sums = self.state().values()
        return {name: total / num_steps for name, total in sums.items()} if num_steps else {}

    def reset(self) -> None:
        """Start a new interval."""
        self._sums.zero_()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval, serialisable as JSON; waits for the device, once.

        The states of a pipeline's stages merge into one by joining their `squared_sums`.
        """
        *sums, num_steps = self._sums.tolist()
        squared_sums = dict(zip(self._names, sums, strict=True))
        return {"num_steps": int(num_steps), "squared_sums": squared_sums}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a `state`, which may hold other stages' sublayers as well."""
        squared_sums = state["squared_sums"]
        if missing := [name for name in self._names if name not in squared_sums]:
            raise ValueError(
                f"the saved gradient signals lack the sublayers {missing}; they have "
                f"{sorted(squared_sums)}. Load the merged state of all stages, or call reset()"
            )
        values = [*(squared_sums[name] for name in self._names), state["num_steps"]]
        self._sums.copy_(torch.tensor(values, dtype=torch.float64))


def layer_norms(
    per_sublayer: Mapping[str, float], layer_of: Mapping[str, int], num_layers: int
) -> tuple[float | None, ...]:
    """Combine the mean squared norms of all stages' sublayers into the norm of each layer.

    Layers are numbered from 0; `num_layers` is the head's number, which is ignored. None is for a
    layer of which no sublayer is given.
    """
    squares: list[list[float]] = [[] for _ in range(num_layers + 1)]
    for name, square in per_sublayer.items():
        squares[layer_of[name]].append(square)
    # fsum is exact whatever the order, which is that of the stages' answers.
    return tuple(math.sqrt(math.fsum(own)) if own else None for own in squares[:-1])


def _square(gradient: Tensor) -> Tensor:
    # For an embedding of 30 M values in float32 it is off by 5e-5, a norm on CPU by 2e-3.
    flat = gradient.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    return torch.dot(flat, flat)

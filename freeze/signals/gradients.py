"""Measure gradient norms while training, without waiting for the device.

Squares and absolute values of disjoint parameters add, so a layer's norm follows from its
sublayers', wherever those live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

_PIECE = 2**20
"""Values whose squares are added up in float32, which is off by 1e-6 then."""
_CACHED_PIECE = 2**18
"""Values that stay in a core's cache while several measures look at them."""


@final
class GradientSignals:
    """Accumulate the squared gradient norm of each sublayer over the steps of an interval.

    Call `squared_norm` once per step on the reduced, unscaled, unclipped gradients. All sums over
    tensors and steps are float64.

    Args:
        parameters: each sublayer's parameters by the sublayer's name, all on one device. A tied
            parameter counts in the first sublayer that lists it, so that the total is the norm of
            the whole gradient.
        absolute: whether to add up absolute values, too.
    """

    def __init__(
        self, parameters: Mapping[str, Sequence[nn.Parameter]], *, absolute: bool = False
    ) -> None:
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
        self._kinds = ("squared_sums", "absolute_sums")[: 1 + absolute]
        # One row a kind of (sublayers + 1): the sums over steps, then the number of steps in them.
        # One tensor, so that one copy to the host reads all of it.
        shape = len(self._kinds), len(self._names) + 1
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

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
        found = self._by_tensor()
        total = found[0].sum()
        if reduce is not None:
            total = reduce(total)
        step = torch.stack([torch.cat([self._members @ one, self._one[None]]) for one in found])
        self._sums += step.masked_fill(~torch.isfinite(total), 0.0)
        return total

    def reset(self) -> None:
        """Start a new interval."""
        self._sums.zero_()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval, serialisable as JSON; waits for the device, once.

        The states of a pipeline's stages merge into one by joining their sums.
        """
        rows = self._sums.tolist()
        return {
            "num_steps": int(rows[0][-1]),
            **{
                kind: dict(zip(self._names, row[:-1], strict=True))
                for kind, row in zip(self._kinds, rows, strict=True)
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a `state`, which may hold other stages' sublayers as well."""
        rows = []
        for kind in self._kinds:
            sums = state.get(kind, {})
            if missing := [name for name in self._names if name not in sums]:
                raise ValueError(
                    f"the saved gradient signals lack {kind} of the sublayers {missing}; they "
                    f"have {sorted(sums)}. Load the merged state of all stages of a run with the "
                    "same signals, or call reset()"
                )
            rows.append([*(sums[name] for name in self._names), state["num_steps"]])
        self._sums.copy_(torch.tensor(rows, dtype=torch.float64))

    def _by_tensor(self) -> list[Tensor]:
        """Measure every gradient: (tensors,) float64, for each kind."""
        measures = (_square, _absolute)[: len(self._kinds)]
        nothing = [self._zero] * len(measures)
        rows = [
            nothing if p.grad is None else _measured(p.grad.reshape(-1), measures)
            for p in chain.from_iterable(self._parameters)
        ]
        if not rows:
            return [self._one.new_empty(0)] * len(measures)
        return [torch.stack(column).double() for column in zip(*rows, strict=True)]


def _measured(flat: Tensor, measures: Sequence[Callable[[Tensor], Tensor]]) -> list[Tensor]:
    """Add up measures of a gradient, whose pieces a CPU reads from its memory once for all."""
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    piece = _PIECE if len(measures) == 1 else _CACHED_PIECE
    if len(flat) <= piece or flat.device.type != "cpu":
        return [measure(flat) for measure in measures]
    rows = [[measure(part) for measure in measures] for part in flat.split(piece)]
    return [torch.stack(column).sum() for column in zip(*rows, strict=True)]


def _square(values: Tensor) -> Tensor:
    # A norm on CPU is off by 2e-3 for an embedding of 30 M values.
    return torch.dot(values, values)


def _absolute(values: Tensor) -> Tensor:
    return values.abs().sum()

"""Measure gradient norms while training, without waiting for the device.

Squares and absolute values of disjoint parameters add, so a layer's norm follows from its
sublayers', wherever those live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

_PIECE = 2**20
"""Values whose squares are added up in float32, which is off by 1e-6 then."""
_CACHED_PIECE = 2**18
"""Values that stay in a core's cache while several measures look at them."""
_SMALL = 2**12
"""Values of a gradient that are read in less time than a call takes: those go into one."""
Measure: TypeAlias = Callable[[Tensor], Tensor]
"""Adds up something of (N,) float32 or float64 values."""


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

    def __init__(
        self, parameters: Mapping[str, Sequence[nn.Parameter]], *, absolute: bool = False
    ) -> None:
        self._names = tuple(parameters)
        distinct = {p: name for name in reversed(self._names) for p in parameters[name]}
        self._small: list[list[nn.Parameter]] = []
        self._large: list[list[nn.Parameter]] = []
        for name, listed in parameters.items():
            counted = [p for p in dict.fromkeys(listed) if distinct[p] == name]
            self._small.append([p for p in counted if p.numel() <= _SMALL])
            self._large.append([p for p in counted if p.numel() > _SMALL])
        device = next((p.device for p in distinct), torch.device("cpu"))
        self._kinds = ("squared_sums", "absolute_sums")[: 1 + absolute]
        measures: list[Measure] = [_square, _AbsoluteSum()]
        self._measures = measures[: 1 + absolute]
        self._nothing = [torch.zeros((), device=device)] * len(self._kinds)
        self._once = [torch.ones((), device=device)] * len(self._kinds)
        # Adds up what `_measure` returns: by sublayer, the steps, and all that is no step.
        sizes = torch.tensor([*(1 + len(own) for own in self._large), 1])
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        self._adding = torch.zeros(len(sizes) + 1, len(rows), dtype=torch.float64)
        self._adding[rows, torch.arange(len(rows))] = 1
        self._adding[-1, :-1] = 1
        self._adding = self._adding.to(device)
        # One tensor, so that one copy to the host reads all of it.
        shape = len(sizes), len(self._kinds)
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
        step = self._adding @ self._measure()
        total = step[-1, 0]
        if reduce is not None:
            total = reduce(total)
        self._sums += step[:-1].masked_fill(~torch.isfinite(total), 0.0)
        return total

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval, serialisable as JSON; waits for the device, once.

        The states of a pipeline's stages merge into one by joining their sums.
        """
        rows = self._sums.T.tolist()
        return {
            "num_steps": int(rows[0][-1]),
            **{
                kind: dict(zip(self._names, row[:-1], strict=True))
                for kind, row in zip(self._kinds, rows, strict=True)
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a `state`, which may hold other stages' sublayers as well."""
        rows = [
            [*(state[kind][name] for name in self._names), state["num_steps"]]
            for kind in self._kinds
        ]
        self._sums.copy_(torch.tensor(rows, dtype=torch.float64).T)

    def _measure(self) -> Tensor:
        """Return (measured, kinds) float64: by sublayer its small gradients together and each
        large one, and at last a 1 for the step.
        """
        rows = []
        for small, large in zip(self._small, self._large, strict=True):
            together = [g.reshape(-1) for p in small if (g := p.grad) is not None]
            gradients = [torch.cat(together) if together else None, *(p.grad for p in large)]
            rows += [
                self._nothing if g is None else _measured(g, self._measures) for g in gradients
            ]
        columns = zip(*rows, self._once, strict=True)
        return torch.stack([torch.stack(column).double() for column in columns], dim=1)


def _measured(gradient: Tensor, measures: Sequence[Measure]) -> list[Tensor]:
    """Add up measures of a gradient, whose pieces a CPU reads from its memory once for all."""
    flat = gradient.reshape(-1)
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


@final
class _AbsoluteSum:
    """Add up absolute values, on a CPU through memory that is there already: to map fresh memory
    takes four times as long as to read the values.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def __call__(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return values.abs().sum()
        if self._room.dtype != values.dtype or len(self._room) < len(values):
            self._room = torch.empty(max(_CACHED_PIECE, len(values)), dtype=values.dtype)
        return torch.abs(values, out=self._room[: len(values)]).sum()

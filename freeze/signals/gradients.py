"""Measure gradient norms while training, without waiting for the device.

Sums of squares and of absolute values add up over parameters. So a layer's norm follows from its
sublayers', even where these are on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

_PIECE = 2**20
"""Values whose squares are added up in float32, with an error of about 1e-6."""
_CACHED_PIECE = 2**18
"""Values that stay in a core's cache while several measures look at them."""
_SMALL = 2**12
"""A CPU reads fewer values in less time than a call takes, so small gradients share one call."""
Measure: TypeAlias = Callable[[Tensor], Tensor]
"""Adds up something of (N,) float32 or float64 values."""


@final
class GradientSignals:
    """Accumulate the squared gradient norm of each sublayer over the steps of an interval.

    Call `squared_norm` once per step on the reduced, unscaled, unclipped gradients. All sums over
    tensors and steps are float64.

    Args:
        parameters: by sublayer, all on one device. A tied parameter counts in the first sublayer
            that lists it, so that the total is the norm of the whole gradient.
        absolute: whether to measure L1 norms, too.
    Attributes:
        part_names: for each part that is measured by itself, the name of its sublayer.
    """

    def __init__(
        self, parameters: Mapping[str, Sequence[nn.Parameter]], *, absolute: bool = False
    ) -> None:
        self._names = tuple(parameters)
        # Reversed, so that the first sublayer that lists a tied parameter wins.
        distinct = {p: name for name in reversed(self._names) for p in parameters[name]}
        device = next((p.device for p in distinct), torch.device("cpu"))
        self._on_cpu = device.type == "cpu"
        # By sublayer, the lists of parameters that are measured together.
        parts: list[list[list[nn.Parameter]]] = []
        for name, listed in parameters.items():
            counted = [p for p in dict.fromkeys(listed) if distinct[p] == name]
            small = [p for p in counted if self._on_cpu and p.numel() <= _SMALL]
            large = [[p] for p in counted if not self._on_cpu or p.numel() > _SMALL]
            parts.append([small, *large] if small else large)
        self._parts = [part for own in parts for part in own]
        # Where a CPU reads all small gradients in one call, the parts that it consists of.
        self._joined = [i for i, part in enumerate(self._parts) if part[0].numel() <= _SMALL]
        self.part_names = [n for n, own in zip(self._names, parts, strict=True) for _ in own]
        self._kinds = ("squared_sums", "absolute_sums")[: 1 + absolute]
        measures: list[Measure] = [_square, _AbsoluteSum()]
        self._measures = measures[: 1 + absolute]
        self._nothing = torch.zeros((), device=device)
        self._once = torch.ones((1, len(self._kinds)), dtype=torch.float64, device=device)
        # One matrix product adds up what `_measure` returns, and a 1 for the step: its rows are
        # the sublayers, the number of steps, and the total of the sublayers.
        sizes = torch.tensor([*map(len, parts), 1])
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        adding = torch.zeros(len(sizes) + 1, len(rows), dtype=torch.float64)
        adding[rows, torch.arange(len(rows))] = 1
        adding[-1, :-1] = 1
        self._adding = adding.to(device)
        # One tensor, so that one copy to the host reads it all.
        shape = len(sizes), len(self._kinds)
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def squared_norm(self, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return this step's squared gradient norm, and accumulate it by sublayer if finite.

        Nothing here waits for the device. A parameter without gradient counts 0.

        Args:
            reduce: adds up the stages' totals, so that all stages leave out the same steps; None
                if this process holds the whole model.
        Returns:
            0-dim float64 on the parameters' device (CPU if there are none): the total, NaN or
            infinite if any gradient is.
        """
        return self.squared_norms(reduce)[1]

    @torch.no_grad()
    def squared_norms(
        self,
        reduce: Callable[[Tensor], Tensor] | None = None,
        *,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the squared norm of each part, (parts,) float64, and what `squared_norm` returns.

        Gradients are measured as if multiplied by `scale`, 0-dim float64.
        """
        measured = self._measure()
        if scale is not None:
            square = scale.square()
            measured = measured * (
                square if len(self._kinds) == 1 else torch.stack((square, scale.abs()))
            )
        step = self._adding @ torch.cat((measured, self._once))
        total = step[-1, 0] if reduce is None else reduce(step[-1, 0])
        # NaN - NaN and inf - inf are NaN, and NaN != 0; `isfinite` would be four launches.
        self._sums += step[:-1].masked_fill(total - total != 0, 0.0)
        # Not the sums by sublayer: in a matrix product one NaN makes every row NaN.
        return measured[:, 0], total

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval, serialisable as JSON; waits for the device, once."""
        rows = self._sums.T.tolist()
        return {
            "num_steps": int(rows[0][-1]),
            **{
                kind: dict(zip(self._names, row[:-1], strict=True))
                for kind, row in zip(self._kinds, rows, strict=True)
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a `state`; it may hold other stages' sublayers, too."""
        rows = [
            [*(state[kind][name] for name in self._names), state["num_steps"]]
            for kind in self._kinds
        ]
        self._sums.copy_(torch.tensor(rows, dtype=torch.float64).T)

    def _measure(self) -> Tensor:
        """Return each part's measures, (parts, kinds) float64."""
        if not self._parts:
            return self._once[:0]
        if not self._on_cpu:
            return self._measure_at_once()
        gradients = [[g for p in part if (g := p.grad) is not None] for part in self._parts]
        together = iter(self._flat(gradients))
        rows = []
        for index, own in enumerate(gradients):
            flat = next(together) if index in self._joined else None
            if not own:
                rows.append([self._nothing] * len(self._kinds))
                continue
            rows.append(_measured(own[0].reshape(-1) if flat is None else flat, self._measures))
        columns = zip(*rows, strict=True)
        return torch.stack([torch.stack(column).double() for column in columns], dim=1)

    def _flat(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the small gradients of each part that has some, flat, (n,) each."""
        small = [gradients[index] for index in self._joined]
        every = [gradient for own in small for gradient in own]
        if not every:
            return [self._nothing] * len(small)
        # One call for all: to reshape each takes longer than to read it.
        sizes = [sum(map(Tensor.numel, own)) for own in small]
        return _flatten_dense_tensors(every).split(sizes)

    def _measure_at_once(self) -> Tensor:
        """Measure all gradients in a few launches, which take a GPU longer than reading does."""
        gradients = [g for (p,) in self._parts if (g := p.grad) is not None]
        # Half-precision norms would overflow.
        halves = any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients)
        dtype = torch.float32 if halves else None
        columns = []
        for order in (2, 1)[: len(self._kinds)]:
            norms = iter(torch._foreach_norm(gradients, order, dtype=dtype) if gradients else ())
            of_parts = [self._nothing if p.grad is None else next(norms) for (p,) in self._parts]
            column = torch.stack(of_parts).double()
            columns.append(column.square() if order == 2 else column)
        return torch.stack(columns, dim=1)


def _measured(gradient: Tensor, measures: Sequence[Measure]) -> list[Tensor]:
    """Add up measures of a flat gradient by pieces: all measures read a piece from the cache."""
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    flat = gradient.float() if is_half else gradient
    piece = _PIECE if len(measures) == 1 else _CACHED_PIECE
    if len(flat) <= piece:
        return [measure(flat) for measure in measures]
    rows = [[measure(part) for measure in measures] for part in flat.split(piece)]
    return [torch.stack(column).sum() for column in zip(*rows, strict=True)]


def _square(values: Tensor) -> Tensor:
    # torch's norm on CPU is off by 2e-3 for an embedding of 30 M values.
    return torch.dot(values, values)


@final
class _AbsoluteSum:
    """Add up absolute values through memory that is kept.

    Mapping new memory takes four times as long as reading the values.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def __call__(self, values: Tensor) -> Tensor:
        if self._room.dtype != values.dtype or len(self._room) < len(values):
            self._room = torch.empty(max(_CACHED_PIECE, len(values)), dtype=values.dtype)
        return torch.abs(values, out=self._room[: len(values)]).sum()

"""Measure gradient norms while training, without waiting for the device.

Sums of squares add up over parameters. So a layer's norm follows from its sublayers', even where
these are on different ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

_PIECE = 2**20
"""Values whose squares are added up in float32, with an error of about 1e-6."""
_SMALL = 2**12
"""A CPU reads fewer values in less time than a call takes, so small gradients share one call."""


@dataclass(frozen=True)
class Measured:
    """Hold a step's squared norms, float64 on the device.

    Args:
        parts: (parts,), see `GradientSignals.part_names`.
        sums: of each sublayer, a 1 for the step, and of all. Where one part is NaN, all are.
    """

    parts: Tensor
    sums: Tensor


class GradientSignals:
    """Accumulate the squared gradient norm of each sublayer over the steps of an interval.

    Call `squared_norm` once per step on the reduced, unscaled, unclipped gradients; or `measure`,
    and `add` if the step counts. All sums over tensors and steps are float64.

    Args:
        parameters: by sublayer, all on one device. A tied parameter counts in the first sublayer
            that lists it, so that the total is the norm of the whole gradient.
        device: theirs, where there are none.
    Attributes:
        part_names: for each part that is measured by itself, the name of its sublayer.
    """

    def __init__(
        self,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        device: torch.device | str = "cpu",
    ) -> None:
        self._names = tuple(parameters)
        # Reversed, so that the first sublayer that lists a tied parameter wins.
        distinct = {p: name for name in reversed(self._names) for p in parameters[name]}
        device = next((p.device for p in distinct), torch.device(device))
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
        self._nothing = torch.zeros((), device=device)
        self._once = torch.ones(1, dtype=torch.float64, device=device)
        # One matrix product adds up what `_measure` returns, and a 1 for the step: its rows are
        # the sublayers, the number of steps, and the total of the sublayers.
        sizes = torch.tensor([*map(len, parts), 1])
        rows = torch.arange(len(sizes)).repeat_interleave(sizes)
        adding = torch.zeros(len(sizes) + 1, len(rows), dtype=torch.float64)
        adding[rows, torch.arange(len(rows))] = 1
        adding[-1, :-1] = 1
        self._adding = adding.to(device)
        # One tensor, so that one copy to the host reads it all.
        self._sums = torch.zeros(len(sizes), dtype=torch.float64, device=device)

    def squared_norm(self) -> Tensor:
        """Return this step's squared gradient norm, and accumulate it by sublayer if finite.

        Nothing here waits for the device. A parameter without gradient counts 0. The total is a
        0-dim float64 on the device, NaN or infinite if any gradient is.
        """
        measured = self.measure()
        total = measured.sums[-1]
        # NaN - NaN and inf - inf are NaN, and NaN != 0; `isfinite` would be four launches.
        self.add(measured, skips=total - total != 0)
        return total

    @torch.no_grad()
    def measure(self) -> Measured:
        """Measure this step's gradients, without waiting for the device."""
        parts = self._measure()
        return Measured(parts, self._adding @ torch.cat((parts, self._once)))

    @torch.no_grad()
    def add(
        self, measured: Measured, *, scale: Tensor | None = None, skips: Tensor | None = None
    ) -> None:
        """Accumulate a step that was measured.

        Args:
            scale: 0-dim float64; its gradients count as if multiplied by that.
            skips: 0-dim bool on the device, whether to leave it out.
        """
        sums = measured.sums[:-1]
        if skips is not None:
            sums = sums.masked_fill(skips, 0.0)
        if scale is None:
            self._sums += sums
        else:
            self._sums[:-1] += sums[:-1] * scale.square()
            self._sums[-1] += sums[-1]

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval, serialisable as JSON; waits for the device, once."""
        *sums, num_steps = self._sums.tolist()
        return {
            "num_steps": int(num_steps),
            "squared_sums": dict(zip(self._names, sums, strict=True)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a `state`; it may hold other stages' sublayers, too."""
        sums = [state["squared_sums"][name] for name in self._names]
        self._sums.copy_(torch.tensor([*sums, state["num_steps"]], dtype=torch.float64))

    def _measure(self) -> Tensor:
        """Return each part's squared norm, (parts,) float64."""
        if not self._parts:
            return self._once[:0]
        if not self._on_cpu:
            return self._measure_at_once()
        gradients = [[g for p in part if (g := p.grad) is not None] for part in self._parts]
        together = iter(self._flat(gradients))
        squares = []
        for index, own in enumerate(gradients):
            flat = next(together) if index in self._joined else None
            if not own:
                squares.append(self._nothing)
                continue
            squares.append(_squared_sum(own[0].reshape(-1) if flat is None else flat))
        return torch.stack(squares).double()

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
        norms = iter(torch._foreach_norm(gradients, 2, dtype=dtype) if gradients else ())
        of_parts = [self._nothing if p.grad is None else next(norms) for (p,) in self._parts]
        return torch.stack(of_parts).double().square()


def _squared_sum(gradient: Tensor) -> Tensor:
    """Add up the squares of a flat gradient by pieces."""
    is_half = gradient.dtype in (torch.float16, torch.bfloat16)
    flat = gradient.float() if is_half else gradient
    if len(flat) <= _PIECE:
        return _square(flat)
    return torch.stack([_square(piece) for piece in flat.split(_PIECE)]).sum()


def _square(values: Tensor) -> Tensor:
    # torch's norm on CPU is off by 2e-3 for an embedding of 30 M values.
    return torch.dot(values, values)

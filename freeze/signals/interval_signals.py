"""Measure the signals asked for between two decisions, and add them up by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from freeze.signals.gradients import GradientSignals
from freeze.signals.weight_changes import (
    GradientSums,
    Parameters,
    WeightChanges,
    relative_update,
)

_BEFORE, _SUM = "signal:before", "signal:sum"
"""Names of the tensors that a stage keeps beside a parameter."""


@final
class IntervalSignals(GradientSignals):
    """Measure a stage's sublayers from decision to decision.

    All parameters are on one device. `wanted` are fields of `LayerStats`. Gradient norms are
    always measured, as every step needs their sum.
    """

    def __init__(
        self,
        parameters: Parameters,
        wanted: frozenset[str] = frozenset(),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__({name: list(own.values()) for name, own in parameters.items()}, device)
        self._wanted = wanted
        self._changes = WeightChanges(parameters) if "relative_update" in wanted else None
        self._gradient_sums = (
            GradientSums(parameters) if "accumulated_gradient" in wanted else None
        )
        kept = {_BEFORE: self._changes, _SUM: self._gradient_sums}
        self._kept = {entry: one for entry, one in kept.items() if one is not None}

    def begin_step(self) -> None:
        """Copy the weights if an interval begins."""
        if self._changes is not None:
            self._changes.begin()

    @property
    def needs_finite(self) -> bool:
        """Return whether `add_gradients` must be called, and only for steps without a NaN."""
        return self._gradient_sums is not None

    def add_gradients(self, *, scale: float = 1.0) -> None:
        """Add a step's finite, reduced, unclipped gradients, as if multiplied by `scale`."""
        if self._gradient_sums is not None:
            self._gradient_sums.add(scale)

    def measured(self) -> dict[str, Any]:
        """Return the interval's sums so far, by sublayer; waits for the device.

        "squared_sums" are of gradients over steps, "sum" is the L1 norm of their sum. "moved" and
        "size" are squared norms of the weights' change, and of the weights before. "num_steps"
        counts steps with finite gradients.
        """
        found = super().state()
        if not found["num_steps"]:
            return {"num_steps": 0}
        if self._changes is not None:
            squares = self._changes.squares()
            found["moved"] = {name: moved for name, (moved, _) in squares.items()}
            found["size"] = {name: size for name, (_, size) in squares.items()}
        if self._gradient_sums is not None:
            found["sum"] = self._gradient_sums.absolute()
        return found

    def reset(self) -> None:
        super().reset()
        for kept in self._kept.values():
            kept.reset()

    def state(self) -> dict[str, Any]:
        """See `GradientSignals.state`; the kept tensors are in `tensors`."""
        return {**super().state(), "wanted": sorted(self._wanted)}

    @staticmethod
    def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the union of all stages' `state` or `measured`; replicas' are equal."""
        whole: dict[str, Any] = {}
        for state in states:
            for key, value in state.items():
                if isinstance(value, Mapping):
                    whole.setdefault(key, {}).update(value)
                else:
                    whole[key] = value
        return whole

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of `state`; begin a new one if it lacks a signal wanted now."""
        if self._wanted <= set(state["wanted"]):
            super().load(state)
        else:
            self.reset()

    def tensors(self, sublayer: str) -> dict[str, Tensor]:
        """Return a sublayer's tensors of the unfinished interval, by "parameter/entry"."""
        return {
            f"{name}/{entry}": tensor
            for entry, kept in self._kept.items()
            for name, tensor in kept.tensors.get(sublayer, {}).items()
        }

    def put_tensors(self, sublayer: str, tensors: Mapping[str, Tensor]) -> None:
        """Continue with what `tensors` returned; other entries are ignored."""
        for entry, kept in self._kept.items():
            end = f"/{entry}"
            own = {key.removesuffix(end): t for key, t in tensors.items() if key.endswith(end)}
            kept.put(sublayer, own)


def is_signal_tensor(key: str) -> bool:
    """Return whether a "parameter/entry" names a signal's tensor."""
    return key.endswith((f"/{_BEFORE}", f"/{_SUM}"))


def layer_values(
    measured: Mapping[str, Any], layer_of: Mapping[str, int], num_layers: int
) -> dict[str, tuple[float | None, ...]]:
    """Return each signal's values by layer; None where not measured, NaN or infinite.

    `layer_of` gives the layer of each sublayer; `num_layers` is the head, which is ignored.
    """
    sums = {
        quantity: _by_layer(by_sublayer, layer_of, num_layers)
        for quantity, by_sublayer in measured.items()
        if quantity != "num_steps"
    }
    steps = measured.get("num_steps", 0)
    nothing = (None,) * num_layers
    squares = sums.get("squared_sums", nothing)
    moved, size = sums.get("moved", nothing), sums.get("size", nothing)
    values = {
        "gradient_norm": [None if one is None else math.sqrt(one / steps) for one in squares],
        "accumulated_gradient": list(sums.get("sum", nothing)),
        "relative_update": [
            # Without a gradient a layer moves by weight decay alone.
            relative_update(change, before, num_steps=steps) if square != 0 else None
            for change, before, square in zip(moved, size, squares, strict=True)
        ],
    }
    return {
        name: tuple(one if one is not None and math.isfinite(one) else None for one in own)
        for name, own in values.items()
    }


def _by_layer(
    by_sublayer: Mapping[str, float], layer_of: Mapping[str, int], num_layers: int
) -> tuple[float | None, ...]:
    """Add up sublayers' values; None for a layer without any."""
    by_layer: list[list[float]] = [[] for _ in range(num_layers + 1)]
    for name, value in by_sublayer.items():
        by_layer[layer_of[name]].append(value)
    # fsum is exact in any order, and the order here depends on how layers lie on stages.
    return tuple(math.fsum(values) if values else None for values in by_layer[:-1])

"""Measure all that was asked for between two decisions, and put it together layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from freeze.signals.gradients import GradientSignals
from freeze.signals.weight_changes import (
    GradientSums,
    KeptTensors,
    Parameters,
    WeightChanges,
    relative_update,
)

_BEFORE, _SUM = "signal:before", "signal:sum"
"""How the tensors are named that a stage keeps beside a parameter."""


@final
class IntervalSignals:
    """Measure a stage's sublayers from decision to decision.

    Args:
        parameters: by name, by the sublayer's name; all on one device.
        wanted: signals, named as in `LayerStats`. Gradients' squares are always measured, as
            every step needs their sum.
    """

    def __init__(self, parameters: Parameters, wanted: frozenset[str] = frozenset()) -> None:
        lists = {name: list(own.values()) for name, own in parameters.items()}
        self._wanted = wanted
        self._gradients = GradientSignals(lists, absolute="gradient_l1" in wanted)
        self._changes = WeightChanges(parameters) if "relative_update" in wanted else None
        self._sums = GradientSums(parameters) if "accumulated_gradient" in wanted else None
        kept: dict[str, KeptTensors | None] = {_BEFORE: self._changes, _SUM: self._sums}
        self._kept = {entry: one for entry, one in kept.items() if one is not None}

    def begin_step(self) -> None:
        """Keep the weights, where an interval begins."""
        if self._changes is not None:
            self._changes.begin()

    def squared_norm(self, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the step's squared gradient norm; see `GradientSignals.squared_norm`."""
        return self._gradients.squared_norm(reduce)

    def squared_norms(self, *, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the step's squared norms by part, and in all; see `GradientSignals`."""
        return self._gradients.squared_norms(scale=scale)

    @property
    def part_names(self) -> list[str]:
        """Name the sublayers of these parts."""
        return self._gradients.part_names

    @property
    def needs_finite(self) -> bool:
        """Tell whether `add_gradients` matters, which must not be called for a step with a NaN."""
        return self._sums is not None

    def add_gradients(self) -> None:
        """Take note of gradients that are finite, reduced, unscaled and unclipped."""
        if self._sums is not None:
            self._sums.add()

    def measured(self) -> dict[str, Any]:
        """Return what the interval has shown so far; waits for the device.

        Beside "num_steps", those with finite gradients, these are sums by sublayer: "squared_sums"
        and "absolute_sums" of gradients over steps, "sum", the L1 norm of what they add up to,
        "moved" and "size", squared norms of the weights' change and of what they were.
        """
        found = self._gradients.state()
        if not found["num_steps"]:
            return {"num_steps": 0}
        if self._changes is not None:
            squares = self._changes.squares()
            found["moved"] = {name: moved for name, (moved, _) in squares.items()}
            found["size"] = {name: size for name, (_, size) in squares.items()}
        if self._sums is not None:
            found["sum"] = self._sums.absolute()
        return found

    def reset(self) -> None:
        self._gradients.reset()
        for kept in self._kept.values():
            kept.reset()

    def state(self) -> dict[str, Any]:
        """Return the unfinished interval's numbers; see `GradientSignals.state`."""
        return {**self._gradients.state(), "wanted": sorted(self._wanted)}

    @staticmethod
    def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what all stages' `state`, or `measured`, says; replicas' are equal."""
        whole: dict[str, Any] = {}
        for state in states:
            for key, value in state.items():
                if isinstance(value, Mapping):
                    whole.setdefault(key, {}).update(value)
                else:
                    whole[key] = value
        return whole

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of `state`; begin a new one where it lacks what is wanted now."""
        if self._wanted <= set(state["wanted"]):
            self._gradients.load(state)
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
        """Continue with what `tensors` returned, and with more that is ignored."""
        for entry, kept in self._kept.items():
            end = f"/{entry}"
            own = {key.removesuffix(end): t for key, t in tensors.items() if key.endswith(end)}
            kept.put(sublayer, own)


def is_signal_tensor(key: str) -> bool:
    """Tell whether a "parameter/entry" names a signal's tensor."""
    return key.endswith((f"/{_BEFORE}", f"/{_SUM}"))


def layer_values(
    measured: Mapping[str, Any], layer_of: Mapping[str, int], num_layers: int
) -> dict[str, tuple[float | None, ...]]:
    """Return each signal's values by layer, of what all stages measured.

    Layers are numbered from 0; `num_layers` is the head's number, which is ignored. None is for
    what was not measured, or is no number.
    """
    sums = {
        quantity: _by_layer(by_sublayer, layer_of, num_layers)
        for quantity, by_sublayer in measured.items()
        if quantity != "num_steps"
    }
    steps = measured.get("num_steps", 0)
    nothing = (None,) * num_layers
    squares, absolute = sums.get("squared_sums", nothing), sums.get("absolute_sums", nothing)
    moved, size = sums.get("moved", nothing), sums.get("size", nothing)
    values = {
        "gradient_norm": [None if one is None else math.sqrt(one / steps) for one in squares],
        "gradient_l1": [None if one is None else one / steps for one in absolute],
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
    """Add sublayers' values up; None is for a layer of which no sublayer is given."""
    own: list[list[float]] = [[] for _ in range(num_layers + 1)]
    for name, value in by_sublayer.items():
        own[layer_of[name]].append(value)
    # fsum is exact whatever the order, which is that of the stages' answers.
    return tuple(math.fsum(values) if values else None for values in own[:-1])

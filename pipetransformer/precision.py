"""Run sublayers in low precision, over weights in float32.

    sublayer        0            1          ...   the last
    weights     float32       float32             float32
    computes    bf16, in an autocast of its own   bf16
    returns          bf16 ──►     bf16  ──► ...   float32 ──► loss

Every sublayer's output is rounded, and with it the gradient that comes back, and not only what
leaves a stage: so the numbers do not depend on where stages are cut or how deep a prefix is
frozen. Messages, saved activations and the cache's rows take half the bytes. Loss, metrics, norms,
sums of gradients and the optimizer are in float32, as the weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from pipetransformer.adapters import LayeredModel


@final
@dataclass(frozen=True)
class Precision:
    """Say in which dtype sublayers compute; None is as the weights are."""

    dtype: torch.dtype | None = None

    @staticmethod
    def named(name: str | None) -> Precision:
        """Return what `TrainConfig.precision` names."""
        return _NAMED[name]

    def __str__(self) -> str:
        """Name it where numbers of several precisions must be told apart."""
        return "as the weights are" if self.dtype is None else f"autocast to {self.dtype}"

    def call(
        self,
        model: LayeredModel,
        index: int,
        value: Tensor | Mapping[str, Tensor],
        *,
        sides: Mapping[str, Tensor],
    ) -> Tensor:
        """Run one sublayer; arguments and errors are those of `LayeredModel.call`.

        Returns:
            what the sublayer returned; a floating output in this dtype, the last sublayer's in
            float32.
        """
        if self.dtype is None:
            return model.call(index, value, sides=sides)
        given = value if isinstance(value, Tensor) else next(iter(value.values()))
        # A cache of cast weights would save nothing, as a call mostly uses a weight once. Without,
        # the gradients of one that is used twice are added up in float32.
        with torch.autocast(given.device.type, dtype=self.dtype, cache_enabled=False):
            output = model.call(index, value, sides=sides)
        if not output.is_floating_point():
            return output
        is_last = index == len(model.sublayers) - 1
        return output.to(torch.float32 if is_last else self.dtype)


_NAMED = {
    None: Precision(),
    "bf16": Precision(torch.bfloat16),
    "fp16": Precision(torch.float16),
}

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
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pipetransformer.adapters import LayeredModel

DTYPES: Mapping[str | None, torch.dtype | None] = {
    None: None, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
"""What sublayers compute in, by the names of `TrainConfig.precision`; None: as the weights are."""


def computing_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Have sublayers compute in a dtype, as long as `run_in` is called for them."""
    if dtype is None:
        return nullcontext()
    # A cache of cast weights would save nothing, as a call mostly uses a weight once. Without,
    # the gradients of one that is used twice are added up in float32.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def run_in(
    dtype: torch.dtype | None,
    model: LayeredModel,
    index: int,
    value: Tensor | Mapping[str, Tensor],
    *,
    sides: Mapping[str, Tensor],
) -> Tensor:
    """Run one sublayer within `computing_in`; other arguments are those of `LayeredModel.call`.

    Returns:
        what the sublayer returned; a floating output in this dtype, the last sublayer's in
        float32.
    """
    output = model.call(index, value, sides=sides)
    if dtype is None or not output.is_floating_point():
        return output
    is_last = index == len(model.sublayers) - 1
    return output.to(torch.float32 if is_last else dtype)

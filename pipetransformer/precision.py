"""Run sublayers in low precision, over weights in float32, exactly as a loop's autocast does.

    sublayer        0            1          ...   the last
    weights     float32       float32             float32
    computes    in torch's autocast, which says of each operation in what
    returns     what it has computed, such as residuals in float32    float32 ──► loss

Nothing is rounded that autocast leaves alone, and nothing depends on where stages are cut or how
deep a prefix is frozen. Loss, metrics, norms, sums of gradients and the optimizer are in float32,
as the weights are. (Ours once rounded each sublayer's output: messages and rows took half the
bytes, and a pretrained ViT lost three points of accuracy beside a plain loop. `cache_dtype` asks
for small rows.)
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
        what the sublayer returned, the last one's in float32.
    """
    output = model.call(index, value, sides=sides)
    if dtype is None or not output.is_floating_point() or index < len(model.sublayers) - 1:
        return output
    return output.to(torch.float32)

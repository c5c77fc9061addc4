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

Scale the loss so that its gradient fits into float16.

    gradient of the scaled loss        the step      the scale
    finite, for so many steps          is taken      doubles
    not finite, where the loss is      is skipped    halves
    not finite, at a scale of 1        a number that is not finite as in any other precision

The norm over all ranks decides, and each is told the same one: so scales stay equal unspoken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from pipetransformer.model.layered_model import LayeredModel

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


GROWTH_INTERVAL_STEPS = 2000
_FIRST, _LEAST = 2.0**16, 1.0


@final
class LossScale:
    """Hold what the loss is multiplied by before the backward, equal on all ranks.

    Source: as documented for torch.amp.GradScaler, with its defaults. Ours never falls below 1,
    where what overflows is the gradient itself, so that a broken model is noticed.

    Attributes:
        is_dynamic: whether it follows the gradients; else it is always 1.
        value: what gradients are to be divided by.
    """

    def __init__(self, *, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.value = _FIRST if is_dynamic else _LEAST
        self._good_steps = 0

    def explains(self, loss: float, norm: float) -> bool:
        """Tell whether a smaller scale may be all that a step of this gradient norm needs."""
        return self.value > _LEAST and math.isfinite(loss) and not math.isfinite(norm)

    def shrink(self) -> None:
        """Halve the scale, after a gradient that was too large."""
        self.value, self._good_steps = max(_LEAST, self.value / 2), 0

    def note_good_step(self) -> None:
        """Count a step whose gradient was finite; double the scale after so many in a row."""
        self._good_steps += self.is_dynamic
        if self._good_steps == GROWTH_INTERVAL_STEPS:
            self.value, self._good_steps = 2 * self.value, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._good_steps = state["value"], state["good_steps"]

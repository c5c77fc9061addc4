"""Name what sublayers compute in, and scale the loss so that its gradient fits into float16.

    gradient of the scaled loss          the step      the scale
    finite, for 2000 steps in a row      is taken      doubles
    not finite, though the loss is       is skipped    halves
    not finite, at a scale of 1          is refused as in any other precision

The norm over all ranks decides, so scales stay equal on all ranks without a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch

DTYPES: Mapping[str | None, torch.dtype | None] = {
    None: None, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
"""By the names of `TrainConfig.precision`; None: as the weights are."""

GROWTH_INTERVAL_STEPS = 2000
_FIRST, _LEAST = 2.0**16, 1.0


@final
class LossScale:
    """Hold the factor on the loss before the backward, equal on all ranks.

    Source: as documented for torch.amp.GradScaler, with its defaults. Ours never falls below 1:
    there the gradient itself overflows, and a broken model must be noticed.

    Attributes:
        is_dynamic: whether it follows the gradients; else it is always 1.
        value: divide gradients by it.
    """

    def __init__(self, *, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.value = _FIRST if is_dynamic else _LEAST
        self._good_steps = 0

    def explains(self, loss: float, norm: float) -> bool:
        """Return whether a smaller scale may be all that a step of this gradient norm needs."""
        return self.value > _LEAST and math.isfinite(loss) and not math.isfinite(norm)

    def shrink(self) -> None:
        """Halve the scale, after a gradient that overflowed."""
        self.value, self._good_steps = max(_LEAST, self.value / 2), 0

    def note_good_step(self) -> None:
        """Count a step whose gradient was finite; double the scale after enough in a row."""
        self._good_steps += self.is_dynamic
        if self._good_steps == GROWTH_INTERVAL_STEPS:
            self.value, self._good_steps = 2 * self.value, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._good_steps = state["value"], state["good_steps"]

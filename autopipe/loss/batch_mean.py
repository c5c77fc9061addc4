"""Join a global batch's mean loss, and its gradient, from micro-batches computed apart.

    loss of a part    back-propagated                 counts
    a mean            mean * samples / batch          its samples
    (sum, count)      sum / batch                     what it says

A part does not know the others' counts yet, so gradients are divided by the batch's samples. Once
all counts are known, `mean_and_correction` gives the factor to the true mean's. Numbers may be on
a device, where nothing waits for them.
"""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import TypeAlias, final

import torch
from torch import Tensor

from autopipe.loss.loss_functions import LossValue, head_of

Number: TypeAlias = Tensor | float
"""A 0-dim float64 tensor, or a number on the host."""


@final
class BatchMean:
    """Collect the losses of this rank's micro-batches of a step.

    Args:
        num_samples: of the global batch.
        scale: a factor on the loss before the backward.
    Attributes:
        divisor: of the gradients of sums of losses.
    """

    def __init__(self, num_samples: int, *, scale: float = 1.0) -> None:
        self.divisor = num_samples / scale
        self._parts: list[tuple[Number, Number]] = []

    def add(self, value: LossValue, num_samples: int) -> Tensor:
        """Take a micro-batch's loss; return what to back-propagate, 0-dim."""
        self._parts.append(sum_and_count(value, num_samples))
        head = head_of(value)
        if isinstance(value, tuple):
            return head / self.divisor
        return head * (num_samples / self.divisor)

    def sums(self) -> tuple[Number, Number]:
        """Return the losses' sum, and what they count, so far."""
        if not self._parts:
            return 0.0, 0.0
        total, count = (reduce(add, column) for column in zip(*self._parts, strict=True))
        return total, count


def sum_and_count(value: LossValue, num_samples: int) -> tuple[Number, Number]:
    """Return a loss's value as (sum, count), which add up over parts."""
    if isinstance(value, tuple):
        total, count = value
        return precise(total), precise(count)
    return precise(value) * num_samples, float(num_samples)


def precise(value: Number) -> Number:
    """Return a number to add up: in bfloat16 or float16 sums stall or overflow."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def mean_and_correction(
    total: Number, count: Number, num_samples: float
) -> tuple[Number, Number | None]:
    """Return a batch's mean, and the factor from its gradients so far to the mean's.

    Where nothing counts the mean is 0. A loss without a count gives one that is not finite.

    Args:
        num_samples: of the batch, by which gradients were divided.
    Returns:
        a factor of None is 1.
    """
    if not isinstance(count, Tensor):
        if not count:
            return mean_of(float(total), count), None
        return total / count, None if count == num_samples else num_samples / count
    every = torch.tensor(float(num_samples), dtype=torch.float64)
    # torch.where would copy a Python number to the GPU, and wait.
    count = count.masked_fill((count == 0) & (total == 0), num_samples)
    return total / count, torch.div(every, count)


def mean_of(total: float, count: float) -> float:
    """Return total / count: 0 if both are 0, NaN if only the count is."""
    if count:
        return total / count
    return 0.0 if total == 0 else math.nan

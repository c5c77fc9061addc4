"""Say when two tensors that should be equal are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Allow |difference| <= absolute + relative * max|tensor|.

    In float64 rounding is far below both, and in float32 the split of a batch alone moves sums by
    some 1e-6 of what they are made of.
    """

    absolute: float
    relative: float

    @staticmethod
    def of(dtype: torch.dtype) -> Tolerance:
        return Tolerance(1e-9, 1e-7) if dtype == torch.float64 else Tolerance(1e-6, 1e-4)

    def difference(self, one: Tensor, other: Tensor, *, scale: float = 0.0) -> str:
        """Say how tensors differ: in shape, by more than is allowed, or by a NaN; "" if not.

        What is allowed goes by the largest value, or by `scale` if that is larger.
        """
        if one.shape != other.shape:
            return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
        if one.numel() == 0:
            return ""
        largest = float(other.abs().max())
        difference = float((one.double() - other.double()).abs().max())
        if difference <= self.absolute + self.relative * max(largest, scale):
            return ""
        return f"by {difference:.3g} where the largest is {largest:.3g}"

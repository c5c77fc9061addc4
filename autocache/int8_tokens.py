"""Store hidden states as int8, with one scale a token.

token:   D values, one byte each | scale, 8 bytes

A value is its byte times the scale. The scale is a token's largest absolute value over 127. So a
token with large values takes no precision from others.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 127
_SCALE = torch.float64
"""As wide as a word of a store, so that rows are read without another copy. Its values are those
of float32."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A token of zeros must not be divided by zero."""


def takes_tokens(hidden: Tensor) -> bool:
    """Return whether hidden states have tokens, (N, ..., S, D), of floating-point numbers."""
    return hidden.is_floating_point() and hidden.ndim > 2


def pack(hidden: Tensor) -> Tensor:
    """Return (N, ..., S, D) hidden states as (N, ..., S, D + 8) int8."""
    values = hidden.float()
    scale = values.abs().amax(dim=-1, keepdim=True).div_(_LARGEST).clamp_min_(_LEAST_SCALE)
    whole = (values / scale).round_().to(torch.int8)
    return torch.cat((whole, scale.to(_SCALE).view(torch.int8)), dim=-1)


def unpack(rows: Tensor) -> Tensor:
    """Return the (N, ..., S, D) float32 hidden states that `pack` rows stand for."""
    whole, scale = rows.split((rows.shape[-1] - _SCALE.itemsize, _SCALE.itemsize), dim=-1)
    # One rounding of an exact product: the same bits on every device.
    return whole.float().mul_(scale.contiguous().view(_SCALE).float())

"""Say what must hold of parameters that move, and be kept of them."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out_as(pattern: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of another of its shape; itself where it has them."""
    strides = torch.empty_like(pattern, device="meta").stride()
    if tensor.stride() == strides:
        return tensor
    laid_out = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)


def has_hooks(parameter: Tensor, *, but_ours: bool = False) -> bool:
    """Tell whether a parameter has tensor hooks; a reducer's own one is left out if asked."""
    # torch has no public way to ask.
    late = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return bool(parameter._backward_hooks) or len(late) > int(but_ours)


def refuse_hooks(name: str, parameter: Tensor) -> None:
    """Refuse hooks on a parameter: they would stay behind where it moves.

    Raises:
        ValueError: it has one.
    """
    if has_hooks(parameter):
        raise ValueError(
            f"parameter {name!r} has tensor hooks, which run on parts of a batch's gradient and "
            "would be lost where the parameter moves; remove them, and put what they do into the "
            "loss, the module or the optimizer"
        )

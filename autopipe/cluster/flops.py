"""Say how many FLOPs an operation of torch has, where torch's own formulas lack or mistake it.

FLOPs are those of matrix products, convolutions and attention, two a multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
COUNTED_AS = {
    getattr(_aten, f"{_FLASH}_for_cpu"): getattr(_aten, _FLASH),
    getattr(_aten, f"{_FLASH}_for_cpu_backward"): getattr(_aten, f"{_FLASH}_backward"),
}
"""What torch before 2.15 does not count, and what it does that takes the same arguments."""
_OF_TORCH = {"aten", "prims"}


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of an operation that has run; 0 for one of torch's that is no product.

    Raises:
        NotImplementedError: the operation is not torch's, and no formula is registered for it.
    """
    packet = func.overloadpacket
    if (formula := _FORMULAS.get(packet)) is not None:
        return formula(*args, **kwargs)
    count = flop_registry.get(packet, flop_registry.get(COUNTED_AS.get(packet)))
    if count is not None:
        return int(count(*args, **kwargs, out_val=result))
    if func.namespace not in _OF_TORCH:
        raise NotImplementedError(
            f"nobody has said, by torch.utils.flop_counter.register_flop_formula, what {packet} "
            "computes"
        )
    return 0


def _convolution_backward(gradient: Tensor, hidden: Tensor, weight: Tensor, *options: Any) -> int:
    """Count what the forward computes, for the input's gradient and for the weights'.

    torch's formula forgets that a group's weights see that group's channels alone.

    Args:
        gradient, hidden, weight: of the output; the input; (C_out, C_in / groups, ...), or, where
            transposed, (C_in, C_out / groups, ...).
        options: of `aten.convolution_backward`, from bias_sizes on.
    """
    is_transposed, output_mask = options[4], options[-1]
    batch, _, *places = (hidden if is_transposed else gradient).shape
    return 2 * batch * prod(places) * weight.numel() * sum(output_mask[:2])


def _grouped_mm(left: Tensor, right: Tensor, *options: Any, **named: Any) -> int:
    """Count a product of matrices in groups, along the dimension that a 2-D side shares out."""
    groups = len(left) if left.dim() == right.dim() == 3 else 1
    return 2 * groups * prod(left.shape[-2:]) * right.shape[-1]


def _mv(matrix: Tensor, vector: Tensor) -> int:
    return 2 * matrix.numel()


def _trilinear(*args: Any, **named: Any) -> int:
    """Count a bilinear form, or one of its gradients, as a product over all that it sums.

    The first three arguments are tensors, the next three the dimensions that each is given.
    """
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dimension in sorted(expanded):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return 2 * prod(torch.broadcast_shapes(*shapes))


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward: _convolution_backward,
    _aten._grouped_mm: _grouped_mm,
    _aten._trilinear: _trilinear,
    _aten.mv: _mv,
}

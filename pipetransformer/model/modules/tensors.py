"""Name a model's tensors, and know what of them has to be minded where they move."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipetransformer.model.modules.held_values import is_opaque, opaque_kept


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, persistent or not, each under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def state_of(model: nn.Module, *, movable: bool) -> dict[str, Tensor]:
    """Return a model's state: its own tensors, not copies.

    Args:
        movable: whether to leave out opaque tensors, and what their modules add to the state.
    """
    tensors = [*named_tensors(model).values()]
    with opaque_kept(tensors):
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if not movable or not any(map(is_opaque, tensors)):
        return state
    own = {id(one) for one in tensors if not is_opaque(one)}
    return {name: one for name, one in state.items() if id(one) in own}


_LEAST_TABLE_BYTES = 1 << 20


def large_embeddings(module: nn.Module, device: torch.device) -> list[nn.Embedding]:
    """Return the embeddings whose gradients replicas sum by touched rows alone."""
    if device.type != "cpu":  # Finding the rows was never timed on a GPU.
        return []
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.weight.nbytes >= _LEAST_TABLE_BYTES
    ]


def laid_out_as(pattern: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of a pattern of its shape; itself where it has them."""
    strides = torch.empty_like(pattern, device="meta").stride()
    if tensor.stride() == strides:
        return tensor
    laid_out = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)


def has_hooks(parameter: Tensor, *, but_ours: bool = False) -> bool:
    """Return whether a parameter has tensor hooks; `but_ours` leaves out a reducer's."""
    # torch has no public way to ask.
    late = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return bool(parameter._backward_hooks) or len(late) > int(but_ours)


def refuse_hooks(name: str, parameter: Tensor) -> None:
    """Raise a ValueError for hooks on a parameter: they would stay behind where it moves."""
    if has_hooks(parameter):
        raise ValueError(
            f"parameter {name!r} has tensor hooks, which run on parts of a batch's gradient and "
            "would be lost where the parameter moves; remove them, and put what they do into the "
            "loss, the module or the optimizer"
        )

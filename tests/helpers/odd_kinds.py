"""Name the kinds of layers that odd models consist of, and say which of them may be refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as weight_norm_by_hook

from tests.helpers.odd_layers import (
    NUM_TOKENS,
    WIDTH,
    Attention,
    ByChannel,
    Constants,
    Counting,
    Gain,
    Patches,
    Recurrent,
    Residual,
    Routed,
    Running,
    SameMemory,
    Scaled,
    SharedTable,
    Spectral,
    Strided,
    TiedAcross,
    TiedWithin,
    Unused,
    channels_last,
    kept,
    kept_by_reentering,
    mlp,
    spread,
)
from tests.helpers.pipes import Call

Build = Callable[[], nn.Module]


def user_frozen(*, whole: bool) -> nn.Module:
    """Build a layer of which the user trains a part, or nothing."""
    layer = Residual(mlp())
    (layer if whole else layer.block[1]).requires_grad_(False)
    return layer


def with_attributes() -> nn.Module:
    """Build a layer whose parameters say how they are to be trained."""
    layer = Residual(mlp())
    for parameter in layer.parameters():
        parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return layer


def halve(gradient: Tensor) -> Tensor:
    """Halve a gradient: of a sum, it gives the sum of the halves."""
    return 0.5 * gradient


def clamp(gradient: Tensor) -> Tensor:
    """Clamp a gradient: of a sum, it does not give the sum of the clamped."""
    return gradient.clamp(-1e-3, 1e-3)


def halve_in_place(parameter: Tensor) -> None:
    """Halve a gradient that was added up so far."""
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def with_hooks(function: Callable[[Tensor], Tensor] | None) -> nn.Module:
    """Build a layer whose parameters change their gradients; None does so once they are added."""
    layer = Residual(mlp())
    for parameter in layer.parameters():
        if function is None:
            parameter.register_post_accumulate_grad_hook(halve_in_place)
        else:
            parameter.register_hook(function)
    return layer


def double_output(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Double what a module returns."""
    return 2 * output


def halve_input_gradient(_module: nn.Module, gradients: Any, _outputs: Any) -> Any:
    """Halve the gradient of a module's input, where that needs one."""
    return tuple(None if one is None else 0.5 * one for one in gradients)


def with_module_hooks(*, backward: bool = False) -> nn.Module:
    """Build a layer whose modules have hooks on their outputs, and on gradients if asked."""
    layer = Residual(mlp())
    layer.block[1].register_forward_hook(double_output)
    if backward:
        layer.block.register_full_backward_hook(halve_input_gradient)
    return layer


def by_old_weight_norm() -> nn.Module:
    """Build a layer whose weight is computed by a hook before each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Residual(weight_norm_by_hook(nn.Linear(WIDTH, WIDTH)))


def square(norm: Callable[[nn.Module], nn.Module], *, bias: bool = False) -> nn.Module:
    """Build a layer around a square matrix that is computed from other parameters."""
    return Residual(norm(nn.Linear(WIDTH, WIDTH, bias=bias)))


embedding = partial(nn.Embedding, NUM_TOKENS, WIDTH)

FIRST: dict[str, Build] = {
    "linear": lambda: nn.Linear(6, WIDTH),
    "embedding": partial(embedding, padding_idx=0),
    "patches": Patches,
    # An embedding comes next, so that whole numbers go from layer to layer.
    "tokens": nn.Identity,
}
ODD_FIRST: dict[str, Build] = {
    "max_norm": partial(embedding, max_norm=2.0),
    "sparse": partial(embedding, sparse=True),
    "by_frequency": partial(embedding, scale_grad_by_freq=True),
}
"""First layers that may be refused."""

MIDDLE: dict[str, Build] = {
    "mlp": lambda: Residual(mlp()),
    "shared": lambda: Residual(mlp(), times=3),
    "checkpoint": lambda: Residual(mlp(), call=kept),
    "shared_checkpoint": lambda: Residual(mlp(), times=2, call=kept),
    "reentrant": lambda: Residual(mlp(), call=kept_by_reentering),
    "channels_last": channels_last,
    "constants": Constants,
    "attributes": with_attributes,
    "module_hooks": with_module_hooks,
    "part_frozen": lambda: user_frozen(whole=False),
    "user_frozen": lambda: user_frozen(whole=True),
    "tied_within": TiedWithin,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "spread": lambda: Call(spread),
    "unused": Unused,
    "routed": Routed,
    "float_state": lambda: Scaled(rate=1.0),
    "transposed": lambda: Strided(dense=True),
    "gaps": lambda: Strided(dense=False),
    "scalar": Gain,
    "gru": Recurrent,
    "attention": Attention,
}
ODD_MIDDLE: dict[str, Build] = {
    "shared_reentrant": lambda: Residual(mlp(), times=2, call=kept_by_reentering),
    "counter": Counting,
    "running": Running,
    "instance_norm": lambda: Residual(
        ByChannel(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True))
    ),
    "batch_norm": lambda: Residual(ByChannel(nn.BatchNorm1d(WIDTH))),
    "spectral_norm": lambda: square(parametrizations.spectral_norm),
    "weight_norm": lambda: square(parametrizations.weight_norm, bias=True),
    "old_weight_norm": by_old_weight_norm,
    "orthogonal": lambda: square(parametrizations.orthogonal),
    "hook": lambda: with_hooks(halve),
    "backward_hook": lambda: with_module_hooks(backward=True),
    "hook_clamp": lambda: with_hooks(clamp),
    "hook_after": lambda: with_hooks(None),
    "drifting": lambda: Scaled(rate=0.9),
    "tied_across": TiedAcross,
    "same_memory": SameMemory,
    "same_memory_across": TiedAcross,
    "shared_table": SharedTable,
    "complex": Spectral,
    "stop_gradient": lambda: Call(Tensor.detach),
    "in_place": lambda: nn.Hardtanh(-2.0, 2.0, inplace=True),
}
"""Layers that may be refused."""

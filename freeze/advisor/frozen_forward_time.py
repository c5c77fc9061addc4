"""Time a block's forward as it runs once it is frozen, and leave no trace in the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def can_run_apart(block: nn.Module) -> bool:
    """Tell whether a block's forward can run once more by itself.

    Not where its parameters are held in shards, which are gathered for its own forward alone; nor
    where it is compiled, as that would compile it anew.
    """
    whole = all(type(p) is nn.Parameter and p.numel() for p in block.parameters())
    compiled = any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in block.modules()
    )
    return whole and not compiled and not torch.compiler.is_compiling()


@torch.no_grad()
def frozen_forward_s(
    block: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any], now: Callable[[], float]
) -> float:
    """Run a block without dropout and without a graph; return its seconds.

    Its hooks do not fire; modes, buffers and the caller's random numbers are as before.

    Args:
        block: which has just run.
        now: returns seconds; waits for the device.
    """
    modes = [(module, module.training) for module in block.modules()]
    # What a forward does in place must not reach what autograd has kept.
    buffers = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module._buffers.items()
    ]
    args, kwargs = tree_map(_copied, (inputs, dict(options)))
    devices = {p.device for p in block.parameters() if p.is_cuda}
    with torch.random.fork_rng([device.index for device in devices]):
        try:
            for module, _ in modes:
                module.training = False
            for module, name, buffer in buffers:
                module._buffers[name] = _copied(buffer)
            start = now()
            block.forward(*args, **kwargs)
            return now() - start
        finally:
            for module, training in modes:
                module.training = training
            for module, name, buffer in buffers:
                module._buffers[name] = buffer


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

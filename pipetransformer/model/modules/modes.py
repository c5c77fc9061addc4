"""Put a model's modules into train or eval mode, or a forward into autocast, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def whole_in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Have a model in train or eval mode within the block, and its modules in theirs behind it."""
    modules = modules_of(model)
    modes = [module.training for module in modules]
    try:
        # `train` sets attributes one by one past tensors, which takes long; some classes do more.
        if all(type(m).train is nn.Module.train and "training" in vars(m) for m in modules):
            for module in modules:
                vars(module)["training"] = training
        else:
            model.train(training)
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            vars(module)["training"] = mode  # Past `__setattr__`, which looks for tensors.


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what `model.modules()` yields, in some order, and in a fraction of its time."""
    found, left = {model: None}, [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return [*found]


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give modules their flags."""
    for module, flag in modes:
        # Most have it already, and nn.Module.__setattr__ is slow.
        if module.training is not flag:
            module.training = flag


@contextmanager
def in_mode(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Have modules in a mode within the block, and in their own behind it."""
    before = [(module, module.training) for module, flag in modes if module.training is not flag]
    set_modes(modes)
    try:
        yield
    finally:
        set_modes(before)


def computing_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Have a forward compute in autocast of this dtype; None leaves it as it is."""
    if dtype is None:
        return nullcontext()
    # Autocast's cache of cast weights would save nothing: a call mostly uses a weight once.
    # Without it, the gradients of a weight that is used twice are added up in float32.
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)

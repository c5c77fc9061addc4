"""Run a block once more as if it were frozen, and leave no trace of that.

block      ─ weights, functions, other objects ─►  stand-in: the same ones
           ─ buffers, tensors, lists, dicts    ─►  copies, as a forward may change them
           ─ hooks                             ─►  none, as they may note what they see
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map


def can_run_apart(block: nn.Module, arguments: Any) -> bool:
    """Return whether a block's forward can run once more by itself, with these arguments."""
    return (
        # Sharded parameters are gathered for the block's own forward alone.
        all(type(p) is nn.Parameter and p.numel() for p in block.parameters())
        # A compiled block would be compiled anew.
        and not any(map(_is_compiled, block.modules()))
        and not torch.compiler.is_compiling()
        # What stands in a forward's place may be bound to the block, with its hooks.
        and not any("forward" in vars(module) for module in block.modules())
        and not _has_any_global_hook()
        and _are_plain(arguments)
    )


def _is_compiled(module: nn.Module) -> bool:
    compiled = (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)
    return isinstance(module, compiled) or module._compiled_call_impl is not None


def _are_plain(arguments: Any) -> bool:
    """Return whether a forward changes none of its arguments but tensors, which are copied."""
    # A cache of keys and values, say, would be given the block's own a second time.
    plain = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
    return all(isinstance(leaf, plain) for leaf in tree_leaves(arguments))


@torch.no_grad()
def frozen_forward_s(
    block: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any], now: Callable[[], float]
) -> float:
    """Run a block once more, without dropout and without a graph; return its seconds.

    No hook fires; the block's modes, buffers and attributes, and random numbers are as before.
    What a forward changes elsewhere, as in an object of another class, is not put back.
    """
    args, kwargs = tree_map(_copied, (inputs, dict(options)))
    devices = {p.device for p in block.parameters() if p.is_cuda}
    frozen = _StandIns(block).of(block)
    with torch.random.fork_rng([device.index for device in devices]), _other_generators_kept():
        start = now()
        frozen.forward(*args, **kwargs)
        return now() - start


@contextmanager
def _other_generators_kept() -> Iterator[None]:
    """Put the generators of Python and numpy back behind the block."""
    plain, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(of_numpy)


@final
class _StandIns:
    """Make what stands for a block's modules; each thing has one copy, wherever it is held."""

    def __init__(self, block: nn.Module) -> None:
        # Without `__init__`, whose arguments are not known.
        self._modules = {module: object.__new__(type(module)) for module in block.modules()}
        # With the values: no other may get an address that is known here.
        self._copies: dict[int, tuple[Any, Any]] = {}
        for module, stand_in in self._modules.items():
            held = {name: self.of(value) for name, value in vars(module).items()}
            hookless = {name: value for name, value in vars(nn.Module()).items() if "hook" in name}
            vars(stand_in).update({**held, **hookless, "training": False})

    def of(self, value: Any) -> Any:
        """Return a copy of what a forward may change, with copies within it; else the value."""
        if isinstance(value, nn.Module):
            return self._modules.get(value, value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.of(value.__self__))
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self._new(value)
        return self._copies[id(value)][1]

    def _new(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value
        if type(value) in (dict, OrderedDict, defaultdict):
            own = copy(value)
            own.update({key: self.of(one) for key, one in value.items()})
            return own
        if type(value) in (list, tuple, set):
            return type(value)(map(self.of, value))
        if type(value) is deque:
            return deque(map(self.of, value), value.maxlen)
        return _copied(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

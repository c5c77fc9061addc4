"""Try each optimizer on each kind of model once in a process: it took a tenth of all time."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from pipetransformer.checks import try_optimizer
from pipetransformer.model import OptimizerFactory, OptimizerTraits

_PLAIN = (bool, int, float, str, type, type(None))
_KNOWN: dict[Any, OptimizerTraits] = {}


def try_once(factory: OptimizerFactory, model: nn.Module, device: torch.device) -> OptimizerTraits:
    """Try an optimizer, or return what the same one was found to be; no refusal is remembered."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        shapes = tuple((n, type(p), p.shape, p.dtype, _kind_of(vars(p))) for n, p in trained)
        key = (_kind_of(factory), shapes, device)
    except TypeError:
        return try_optimizer(factory, model, device)
    if key not in _KNOWN:
        _KNOWN[key] = try_optimizer(factory, model, device)
    return _KNOWN[key]


def _kind_of(value: Any) -> Any:
    """Return what is equal for what does the same; raise a TypeError for what may hold more."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = (value.__defaults__, value.__kwdefaults__, vars(value), cells)
        return (value.__module__, value.__code__, _kind_of(held))
    if isinstance(value, partial):
        return (partial, _kind_of([value.func, value.args, value.keywords]))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(_kind_of, value)))
    if isinstance(value, dict):
        return (dict, tuple((key, _kind_of(one)) for key, one in value.items()))
    if isinstance(value, _PLAIN):
        return (type(value), value)
    raise TypeError(f"{value!r} may hold anything")

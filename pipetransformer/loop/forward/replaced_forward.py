"""See through what trainers put around a model's forward, as they do nothing below its head.

accelerate    autocast, and an answer in float32: parts of the model run in autocast anyway
TRL           a head that computes log-probabilities without logits
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipetransformer.model import modules_of

_HARMLESS = ("accelerate.", "trl.", "torch.amp.")
"""Beginnings of modules whose functions may be around a forward."""


@contextmanager
def in_own_forward(model: nn.Module) -> Iterator[None]:
    """Let a model and its parts have their classes' forwards within the block.

    Another's replacement stays: it may change hidden states.
    """
    replaced = {
        module: vars(module).pop("forward")
        for module in modules_of(model)
        if "forward" in vars(module) and _is_harmless(module)
    }
    try:
        yield
    finally:
        for module, forward in replaced.items():
            vars(module)["forward"] = forward


def _is_harmless(module: nn.Module) -> bool:
    """Tell whether all that is around the class's forward is known."""
    around: Any = _function(vars(module)["forward"])
    own = type(module).forward
    while around is not own:
        # A wrapped function's own names are those of what it wraps.
        names = getattr(around, "__globals__", {"__name__": type(around).__module__})
        if not str(names["__name__"]).startswith(_HARMLESS):
            return False
        around = _function(getattr(around, "__wrapped__", None))
    return True


def _function(method: Any) -> Any:
    return getattr(method, "__func__", method)

"""Refuse what was set on a model and is lost, as its parts are called one by one.

replaced methods    forwards of modules that hold blocks are not called
checkpointing       that of such a forward, or of blocks above frozen ones
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import FunctionType
from typing import Any

from torch import nn

from autopipe.profile import recomputes_itself


def qualified_name(kind: type[Any] | FunctionType) -> str:
    """Spell a class as "module.Class": importing timm or transformers to compare takes seconds."""
    return f"{kind.__module__}.{kind.__qualname__}"


def refuse_replaced(*modules: nn.Module, allowed: str = "") -> None:
    """Raise a TypeError for a module whose object overrides a method other than `allowed`."""
    for module in modules:
        own = (
            name
            for name, value in vars(module).items()
            if callable(value) and name != allowed and not _gathers(value)
        )
        if name := next(
            (name for name in own if callable(getattr(type(module), name, None))), None
        ):
            raise TypeError(
                f"{name} of a {type(module).__name__} was replaced, but its parts are called one "
                "by one, so that this would have no effect: put the class's own back, or describe "
                "the model by a LayeredModel"
            )


def _gathers(method: Any) -> bool:
    """Return whether a method only gathers weights around the class's own, as FSDP's do."""
    names = getattr(getattr(method, "__func__", None), "__globals__", {})
    return str(names.get("__name__")).startswith("torch.distributed.fsdp.")


def refuse_checkpointing(model: nn.Module) -> None:
    """Raise a ValueError if activations are recomputed: blocks' own forwards are not called."""
    flags = ("grad_checkpointing", "gradient_checkpointing")
    if any(getattr(module, flag, False) for module in model.modules() for flag in flags):
        raise ValueError(
            f"gradient checkpointing of this {type(model).__name__} is on, but would have no "
            "effect here, as sublayers are called one by one; switch it off, and set "
            "activation_checkpointing=True"
        )


def refuse_lost_checkpointing(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise a ValueError if a model recomputes activations, and its blocks would not, or wrongly.

    Args:
        blocks: called one by one, as they are.
    """
    if not any(map(recomputes_itself, blocks)):
        refuse_checkpointing(model)
    for module in chain.from_iterable(block.modules() for block in blocks):
        asks = vars(module).get("gradient_checkpointing")
        keywords = getattr(vars(module).get("_gradient_checkpointing_func"), "keywords", {})
        if asks and keywords.get("use_reentrant") is not False:
            raise ValueError(
                f"gradient checkpointing of this {type(model).__name__} is reentrant, and would "
                "give a block above frozen ones no gradient; switch it on with "
                "use_reentrant=False, or off"
            )


def asks_for_gradients(hook: object) -> bool:
    """Return whether a hook has what an embedding returns need a gradient."""
    # By peft's examples and transformers; both have names like that.
    return str(getattr(hook, "__name__", "")).startswith("make_inputs_require_grad")


def has_input_gradients(model: nn.Module) -> bool:
    """Return whether a hook has what blocks are given need a gradient, frozen as it may be."""
    hooks = (module._forward_hooks.values() for module in model.modules())
    return any(map(asks_for_gradients, chain.from_iterable(hooks)))

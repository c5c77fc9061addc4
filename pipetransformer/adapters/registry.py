"""Find the adapter of a model by its class; that of an `nn.Sequential` stands here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pipetransformer.adapters import (
    timm_vit,
    transformers_bert,
    transformers_distilbert,
    transformers_modernbert,
    transformers_vit,
)
from pipetransformer.adapters.base import Builders, LayeredModel, Sublayer
from pipetransformer.adapters.transformer import qualified_name


def _take_children(model: nn.Sequential) -> LayeredModel:
    """Take each child of a Sequential as a sublayer and a layer, the last one as the head."""
    if len(model) < 2:
        raise ValueError(
            f"nn.Sequential has {len(model)} children; a pipeline needs at least two "
            "(the last one is the head): give the layers one by one"
        )
    # named_children() leaves out the second use of a module, such as one ReLU() used twice.
    sublayers = [
        Sublayer(name, layer, child)
        for layer, (name, child) in enumerate(zip(model._modules, model, strict=True))
    ]
    # As in a dataset of (x, y) pairs.
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))


_BUILDERS: Builders = {
    nn.Sequential: _take_children,
    timm_vit.CLASS: timm_vit.build,
    **transformers_bert.builders(),
    **transformers_distilbert.builders(),
    **transformers_modernbert.builders(),
    **transformers_vit.builders(),
}


def adapt(model: nn.Module | LayeredModel) -> LayeredModel:
    """Present a model as a sequence of sublayers, by the adapter of its class or nearest base.

    A LayeredModel is returned as it is.

    Raises:
        TypeError: no adapter knows the model, or it overrides the forward that its adapter
            stands for.
        ValueError: the model has a setting or tied tensors that its sublayers cannot honour.
    """
    if isinstance(model, LayeredModel):
        return model
    for kind in type(model).__mro__:
        build = _BUILDERS.get(kind) or _BUILDERS.get(qualified_name(kind))
        if build is not None:
            _check_forward(model, kind)
            return build(model)
    known = ", ".join(
        kind if isinstance(kind, str) else qualified_name(kind) for kind in _BUILDERS
    )
    raise TypeError(
        f"no adapter knows a {qualified_name(type(model))}; known: {known}. Give an "
        "nn.Sequential, a LayeredModel built from its sublayers, or call "
        "register_adapter(class, build)"
    )


def register_adapter(kind: type[nn.Module] | str, build: Callable[[Any], LayeredModel]) -> None:
    """Make `adapt` present models of a class by `build(model)`; the last registration counts.

    Args:
        kind: the class, or its "module.Class" where importing it here would be slow. Covers
            subclasses that have no adapter of their own and do not override `forward`.
    """
    _BUILDERS[kind] = build


def _check_forward(model: nn.Module, kind: type[Any]) -> None:
    # __func__ also tells a forward that was set on the object, as hooking libraries do.
    if getattr(model.forward, "__func__", None) is not kind.forward:
        raise TypeError(
            f"{qualified_name(type(model))} overrides forward of {kind.__name__}, but its adapter "
            "would ignore that; call register_adapter for it, or give a LayeredModel"
        )

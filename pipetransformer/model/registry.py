"""Find the adapter of a model by its class; that of an `nn.Sequential` stands here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.loss import LossFunction
from pipetransformer.model.adapters import (
    timm_vit,
    transformers_bert,
    transformers_modernbert,
    transformers_vit,
)
from pipetransformer.model.forward import EntryNames, Read, names_of
from pipetransformer.model.general import present
from pipetransformer.model.layered_model import Builders, LayeredModel, Sublayer
from pipetransformer.model.modules import qualified_name, refuse_peft
from pipetransformer.model.parts import adapt_parts


def _take_children(model: nn.Sequential) -> LayeredModel:
    """Take each child of a Sequential as a sublayer and a layer, the last one as the head.

    Where one child alone is a row of equal blocks, these are the layers, as in `attach`: what lies
    below them freezes with the first, and what lies above is the head.
    """
    if len(model) < 2:
        raise ValueError(
            f"nn.Sequential has {len(model)} children; a pipeline needs at least two "
            "(the last one is the head): give the layers one by one"
        )
    # named_children() leaves out the second use of a module, such as one ReLU() used twice.
    children = list(zip(model._modules, model, strict=True))
    rows = [place for place, child in enumerate(model) if _blocks_of(child)]
    if len(rows) != 1 or rows[0] == len(model) - 1 or _blocks_of(model):
        sublayers = [Sublayer(name, layer, child) for layer, (name, child) in enumerate(children)]
    else:
        (place,), (outer, row) = rows, children[rows[0]]
        blocks, above = _blocks_of(row), [child for _, child in children[place + 1 :]]
        sublayers = [Sublayer(name, 0, child) for name, child in children[:place]]
        sublayers += [Sublayer(f"{outer}.{n}", n, block) for n, block in enumerate(blocks)]
        head = above[0] if len(above) == 1 else nn.Sequential(*above)
        sublayers.append(Sublayer(children[-1][0], len(blocks), head))
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a plain Sequential, if they are several of one class."""
    blocks = list(module) if type(module) is nn.Sequential else []
    return blocks if len(blocks) > 1 and len({type(block) for block in blocks}) == 1 else []


_BUILDERS: Builders = {
    nn.Sequential: _take_children,
    timm_vit.CLASS: timm_vit.build,
    **transformers_bert.builders(),
    **transformers_modernbert.builders(),
    **transformers_vit.builders(),
}

_SHIPPED = frozenset(_BUILDERS.values())

_WRAPPED = ("_orig_mod", "module")
"""Where torch.compile, and DataParallel and DDP, hold the model that they wrap."""


def adapt(
    model: nn.Module | LayeredModel,
    read: Read | None = None,
    *,
    loss_fn: LossFunction | None = None,
    unties: bool = False,
    parts: Sequence[str] = (),
    computes_in: torch.dtype | None = None,
) -> LayeredModel:
    """Present a model as a sequence of sublayers, by the adapter of its class or by running it.

    A LayeredModel is returned as it is.

    Args:
        read: reads a few samples, for a model whose class has no adapter.
        loss_fn: the user's own, in whose place no loss of the model is looked for.
        unties: whether a head gets copies of the tensors that it shares with layers below.
        parts: names of modules that are layer 0, wherever they are; they are frozen.
        computes_in: the dtype of the run's autocast, in which parts are run.
    Raises:
        TypeError: no adapter knows the model, and no samples are given.
        ValueError: the model has a setting that its sublayers cannot honour, or no row of blocks.
    """
    if isinstance(model, LayeredModel):
        if parts and not model.parts:
            raise TypeError(
                f"parts= names modules of a model, {[*parts]}, and the model is a LayeredModel; "
                "give the model itself"
            )
        return model
    refuse_no_module(model)
    refuse_peft(model)
    if parts:
        refuse_wrapper(model)
        assert read is not None, "parts are found by running the model"
        return adapt_parts(model, parts, read, loss_fn=loss_fn, computes_in=computes_in)
    # A model's class, or the nearest base, that has an adapter.
    kinds = type(model).__mro__
    kind = next((k for k in kinds if k in _BUILDERS or qualified_name(k) in _BUILDERS), None)
    if kind is not None:
        build = _BUILDERS.get(kind) or _BUILDERS[qualified_name(kind)]
        try:
            _check_forward(model, kind)
            return build(model)
        except (TypeError, ValueError):
            # Its own forward follows a setting, or a replaced part, that our adapter does not.
            if read is None or build not in _SHIPPED:
                raise
    refuse_wrapper(model)
    if read is None:
        raise TypeError(
            f"no adapter knows a {qualified_name(type(model))} without samples: give them as "
            "read=, or a LayeredModel built from its sublayers, or call "
            "register_adapter(class, build)"
        )
    return present(model, read(names_of(model)), loss_fn, unties=unties)


def entry_names(model: nn.Module | LayeredModel) -> EntryNames:
    """Return the names of the batch entries that a model and its loss take."""
    try:
        layered = adapt(model)
    except (TypeError, ValueError):
        assert isinstance(model, nn.Module)
        return names_of(model)
    return EntryNames(layered.inputs, layered.targets)


def register_adapter(kind: type[nn.Module] | str, build: Callable[[Any], LayeredModel]) -> None:
    """Make `adapt` present models of a class by `build(model)`; the last registration counts.

    Subclasses without an adapter of their own are covered if they do not override `forward`.

    Args:
        kind: the class, or its "module.Class" where importing it here would be slow.
    """
    _BUILDERS[kind] = build


def refuse_no_module(model: Any) -> None:
    """Raise a TypeError for what is no model, such as the name of one."""
    if not isinstance(model, nn.Module):
        name = repr(model) if isinstance(model, str) else "..."
        raise TypeError(
            f"the model is a {type(model).__name__} and no torch.nn.Module; build or load it "
            f"first, as by AutoModelForSequenceClassification.from_pretrained({name})"
        )


def refuse_wrapper(model: nn.Module) -> None:
    """Raise a TypeError for a wrapper of torch's, whose own forward would not be called."""
    for path in _WRAPPED:
        held = getattr(model, path, None)
        if isinstance(held, nn.Module) and qualified_name(type(model)).startswith("torch."):
            raise TypeError(
                f"no adapter knows a {type(model).__name__}: give model.{path}, the "
                f"{type(held).__name__} that it wraps (a wrapper's own forward would not be "
                "called)"
            )


def _check_forward(model: nn.Module, kind: type[Any]) -> None:
    # A forward that was set on the object, as hooking libraries do, has no such __func__.
    if getattr(model.forward, "__func__", None) is not kind.forward:
        raise TypeError(
            f"{qualified_name(type(model))} overrides forward of {kind.__name__}, but its adapter "
            "would ignore that; call register_adapter for it, or give a LayeredModel"
        )

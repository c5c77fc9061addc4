"""Give layers their own learning rates: lower the deeper they are, or as a policy says.

Which layer a parameter is in follows from its name alone, so that it has the same rate in any
stage of any pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from pipetransformer.adapters import LayeredModel
from pipetransformer.optimizer.state_by_name import NamedParameters, OptimizerFactory

LAYER = "layer"
"""The entry of a parameter group that says whose learning rate it has."""


def decay_by_layer(
    factory: OptimizerFactory, model: LayeredModel, decay: float
) -> OptimizerFactory:
    """Return a factory whose learning rates are `decay` times as high a layer further down.

    Each group that the given factory makes is split by layers, and keeps its other settings.

    Source: BEiT's layer-wise decay: the head has the group's own rate, and an embedding is a layer
    of its own below block 0, though it freezes with that. timm counts alike but for a norm below
    the head, which it gives the last block's rate; here it belongs to the head.
    """
    scales = learning_rate_scales(model, decay)

    def lower(group: dict[str, Any], scale: float) -> None:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * scale  # A tensor is the other layers', too.

    # What no sublayer reads has no layer, and no gradient either.
    return _split_groups(factory, lambda name: scales.get(name, 1.0), lower)


def split_by_layer(factory: OptimizerFactory, model: LayeredModel) -> OptimizerFactory:
    """Return a factory whose groups each hold parameters of one layer, and name it as LAYER.

    The head's have no such entry.
    """
    head = model.num_layers
    layer_of = {
        name: sublayer.layer
        for index, sublayer in enumerate(model.sublayers)
        for name in model.tensors(index)
    }

    def mark(group: dict[str, Any], layer: int) -> None:
        if layer != head:
            group[LAYER] = layer

    return _split_groups(factory, lambda name: layer_of.get(name, head), mark)


def learning_rate_scales(model: LayeredModel, decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of every parameter, by its name."""
    top = model.num_layers
    embedding_is_apart = model.sublayers[1].layer == 0
    return {
        name: decay ** (top - sublayer.layer + int(index == 0 and embedding_is_apart))
        for index, sublayer in enumerate(model.sublayers)
        for name in model.tensors(index)
    }


def _split_groups(
    factory: OptimizerFactory,
    key_of: Callable[[str], Any],
    adjust: Callable[[dict[str, Any], Any], None],
) -> OptimizerFactory:
    """Return a factory that splits each group by a key of its parameters' names, highest first."""

    def build(named_parameters: NamedParameters) -> Optimizer:
        keys = {parameter: key_of(name) for name, parameter in named_parameters}
        optimizer = factory(named_parameters)
        parts = []
        for group in optimizer.param_groups:
            for key in sorted({keys[p] for p in group["params"]}, reverse=True):
                part = {**group, "params": [p for p in group["params"] if keys[p] == key]}
                adjust(part, key)
                parts.append(part)
        # In place, as an optimizer may hold this very list elsewhere, too.
        optimizer.param_groups[:] = parts
        return optimizer

    return build

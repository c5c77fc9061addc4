"""Lower the learning rate from layer to layer, the deeper the lower.

Which layer a parameter is in follows from its name alone, so that it has the same rate in any
stage of any pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from pipetransformer.adapters import LayeredModel
from pipetransformer.optimizer.named import NamedParameters, OptimizerFactory


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

    def build(named_parameters: NamedParameters) -> Optimizer:
        # What no sublayer reads has no layer, and no gradient either.
        scale_of = {parameter: scales.get(name, 1.0) for name, parameter in named_parameters}
        optimizer = factory(named_parameters)
        # In place, as an optimizer may hold this very list elsewhere, too.
        optimizer.param_groups[:] = [
            part for group in optimizer.param_groups for part in _split(group, scale_of)
        ]
        return optimizer

    return build


def learning_rate_scales(model: LayeredModel, decay: float) -> dict[str, float]:
    """Return the factor on the learning rate of every parameter, by its name."""
    top = model.num_layers
    embedding_is_apart = model.sublayers[1].layer == 0
    return {
        name: decay ** (top - sublayer.layer + int(index == 0 and embedding_is_apart))
        for index, sublayer in enumerate(model.sublayers)
        for name in model.tensors(index)
    }


def _split(group: Mapping[str, Any], scale_of: Mapping[Any, float]) -> list[dict[str, Any]]:
    """Split a group by its parameters' scales, the highest first."""
    parts = []
    for scale in sorted({scale_of[p] for p in group["params"]}, reverse=True):
        own = [p for p in group["params"] if scale_of[p] == scale]
        rates = {key: group[key] * scale for key in ("lr", "initial_lr") if key in group}
        parts.append({**group, **rates, "params": own})
    return parts

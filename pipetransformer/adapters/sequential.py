"""Present an `nn.Sequential`: every child is one sublayer and one layer, the last one the head."""

from __future__ import annotations

from torch import nn

from pipetransformer.adapters.base import LayeredModel, Sublayer


def build(model: nn.Sequential) -> LayeredModel:
    """Take the children of a Sequential as its sublayers, under their names.

    A nested Sequential stays whole. Entries "x" and "y" are those of a dataset of (x, y) pairs;
    there is no default loss.

    Raises:
        ValueError: fewer than two children; the head alone has nothing to freeze.
    """
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
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",))

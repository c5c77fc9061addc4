"""Copy a model to compare it with itself: in float64 where it can, without dropout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from autopipe.loss import LossFunction
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, named_tensors, output_of

_CHANCES = ("p", "prob", "drop_prob", "drop_rate", "dropout_prob", "dropout_rate", "rate")
"""Names under which modules that only drop keep their probability."""
_DROPOUTS = ("dropout", "dropout_p", "attention_dropout", "attn_dropout", "attn_drop")
"""Names under which other modules keep the probability with which they drop."""


def make_twin(model: LayeredModel, dtype: torch.dtype) -> LayeredModel:
    """Return an independent copy that has a dtype, and drops nothing."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"this {type(model.model).__name__} cannot be copied, and so not be verified: {error}"
        ) from error
    for name, tensor in named_tensors(model.model).items():
        # deepcopy loses a parameter's attributes, at which an optimizer may look.
        vars(twin.tensor(name)).update(vars(tensor))
    twin.convert(dtype)
    # A sublayer's module may be none of the model's own.
    roots = [twin.model, *(sublayer.module for sublayer in twin.sublayers)]
    for module in chain.from_iterable(root.modules() for root in roots):
        only_drops = "drop" in type(module).__name__.lower()
        for name in _CHANCES if only_drops else _DROPOUTS:
            chance = vars(module).get(name)
            if isinstance(chance, float) and 0 < chance < 1:
                setattr(module, name, 0.0)
    return twin


def converted(batch: Mapping[str, Tensor], dtype: torch.dtype) -> Batch:
    """Return a batch whose floating entries have a dtype; ids stay integers."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


@dataclass(frozen=True)
class OwnForward:
    """Call a model's own forward, and its loss, as a user would.

    Args:
        loss_fn: None is the loss that the model itself returns, or else its adapter's.
    """

    model: LayeredModel
    loss_fn: LossFunction | None

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (output, mean loss)."""
        model = self.model
        sides = model.sides_of(0, len(model.sublayers))
        keywords = {n: batch[n] for n in (*model.inputs[1:], *sides) if n in batch}
        first = batch[model.inputs[0]]
        kinds = type(model.model).__mro__
        is_of_transformers = any(kind.__module__.startswith("transformers.") for kind in kinds)
        answers_loss = self.loss_fn is None and is_of_transformers
        if answers_loss:
            keywords |= {name: batch[name] for name in model.targets}
        answer = model.model(first, **keywords)
        output = output_of(answer)
        if answers_loss and answer.loss is not None:
            return output, answer.loss
        loss_fn = self.loss_fn or model.loss_fn
        assert loss_fn is not None, "choose_loss has found one"
        value = loss_fn(output, model.targets_of(batch))
        return output, value[0] / value[1] if isinstance(value, tuple) else value


_ALLOWED = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-6, 1e-4)}
"""Absolute and relative differences. In float64 rounding is far below both. In float32 the split
of a batch alone moves sums by some 1e-6 of their terms."""


def find_gap(one: Tensor, other: Tensor, dtype: torch.dtype, *, scale: float = 0.0) -> str:
    """Say how two tensors differ: in shape, by more than rounding, or by a NaN; "" if not.

    Args:
        dtype: the twin's, float64 or float32; it may not be the tensors' own.
        scale: of what the tensors are a part; the relative limit goes by it, or by their largest.
    """
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if one.numel() == 0:
        return ""
    absolute, relative = _ALLOWED[dtype]
    largest = float(other.abs().max())
    difference = float((one.double() - other.double()).abs().max())
    # A NaN fails this comparison, and so is a difference.
    if difference <= absolute + relative * max(largest, scale):
        return ""
    return f"by {difference:.3g} where the largest is {largest:.3g}"

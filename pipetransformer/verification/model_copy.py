"""Copy a layered model to compare it with itself: in float64 where it can, without dropout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pipetransformer.adapters import LayeredModel, named_tensors
from pipetransformer.data import Batch
from pipetransformer.loss import LossFunction

_CHANCES = ("p", "prob", "drop_prob", "drop_rate", "dropout_prob", "dropout_rate", "rate")
"""Under these names do modules that only drop keep their probability."""
_DROPOUTS = ("dropout", "dropout_p", "attention_dropout", "attn_dropout", "attn_drop")
"""Under these names do other modules keep the probability with which they drop."""


def make_twin(model: LayeredModel, dtype: torch.dtype) -> LayeredModel:
    """Return an independent copy, whose floating tensors have a dtype and which drops nothing."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"this {type(model.model).__name__} cannot be copied, and so not be verified: {error}"
        ) from error
    for name, tensor in named_tensors(model.model).items():
        # torch copies a parameter without what is noted on it.
        vars(twin.tensor(name)).update(vars(tensor))
    twin.convert(dtype)
    roots = [twin.model, *(sublayer.module for sublayer in twin.sublayers)]
    for module in chain.from_iterable(root.modules() for root in roots):
        only_drops = "drop" in type(module).__name__.lower()
        for name in _CHANCES if only_drops else _DROPOUTS:
            chance = vars(module).get(name)
            if isinstance(chance, float) and 0 < chance < 1:
                setattr(module, name, 0.0)
    return twin


def converted(batch: Mapping[str, Tensor], dtype: torch.dtype) -> Batch:
    """Return a batch whose floating entries have a dtype."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


@dataclass(frozen=True)
class OwnForward:
    """Call a model's own forward, and its loss, as a user would.

    Without a `loss_fn` that is the loss that the model itself returns or, where it returns none,
    its adapter's.
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
        output = _output_of(answer)
        if answers_loss and answer.loss is not None:
            return output, answer.loss
        loss_fn = self.loss_fn or model.loss_fn
        assert loss_fn is not None, "choose_loss has found one"
        value = loss_fn(output, model.targets_of(batch))
        return output, value[0] / value[1] if isinstance(value, tuple) else value


def _output_of(answer: Any) -> Tensor:
    """Return the tensor that a loss takes: an answer itself, or its logits."""
    if isinstance(answer, Tensor):
        return answer
    logits = getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    ends = [getattr(answer, name, None) for name in ("start_logits", "end_logits")]
    if all(isinstance(one, Tensor) for one in ends):
        return torch.stack([one for one in ends if isinstance(one, Tensor)], dim=-1)
    raise TypeError(
        f"the model's own forward returned a {type(answer).__name__}, in which no output is known"
    )

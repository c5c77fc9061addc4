"""Divide a language model's loss by the labels that transformers' Trainer counts.

    labels             a   b   c   -100     no token predicts the first
    LlamaForCausalLM       1   1            sum / 2, the mean over predicted tokens
    GPT2LMHeadModel    1   1   1            sum / 3

transformers leaves first labels out where a class is known to shift them, and knows that by the
class's name: a task such as "ForCausalLM" is in it. Of other classes it counts every label.
Then losses and gradients are smaller by that share, as here.

Source: `Trainer.__init__` and `_get_num_items_in_batch` of transformers 5.24. Back to 5.12 they
differ for encoder-decoders alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from autopipe.loss import Loss, LossValue, mean_of
from pipetransformer.model import EntryNames, LayeredModel, output_of, unwrapped, whole_in_mode

_LABELS = "labels"
"""The only entry whose items transformers' Trainer counts."""


def divided_by_labels(
    loss: Loss, layered: LayeredModel, read: Callable[[EntryNames], Mapping[str, Tensor]]
) -> Loss:
    """Return a model's own loss with transformers' divisor; itself where that is another's.

    Args:
        layered: a model by its class's adapter has no loss of tokens that shifts its labels.
        read: reads a few samples, on which the model is asked what it divides by.
    """
    model = layered.model
    if not layered.is_recorded or layered.targets != (_LABELS,) or not _takes_count(model):
        return loss
    batch = read(EntryNames(layered.inputs, layered.targets))
    if _LABELS not in batch or batch[_LABELS].ndim != 2 or not _divides(layered, batch, loss):
        return loss
    return loss.wrapped(partial(_with_divisor, skips_first=_skips_first(model)))


def _takes_count(model: nn.Module) -> bool:
    """Return whether transformers' Trainer tells a model how many labels it has counted."""
    bare: Any = unwrapped(model)
    if (accepts := getattr(bare, "accepts_loss_kwargs", None)) is not None:
        return bool(accepts)
    kinds = {parameter.kind for parameter in inspect.signature(bare.forward).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def _divides(layered: LayeredModel, batch: Mapping[str, Tensor], loss: Loss) -> bool:
    """Return whether a model divides its loss by the number it is told; some do not look at it."""
    model: Any = layered.model
    device = next((parameter.device for parameter in model.parameters()), None)
    inputs = {n: batch[n].to(device) for n in (*layered.inputs, _LABELS) if n in batch}
    # Larger than any count, so that no mean over tokens is equal by chance.
    count = torch.tensor(2 * inputs[_LABELS].numel(), device=device)
    with torch.no_grad(), whole_in_mode(model, training=False):
        answer = model(**inputs, num_items_in_batch=count)
        value = loss(output_of(answer), inputs[_LABELS])
    # In low precision the same sum in another order differs by more.
    allowed = 1e-4 if answer.loss.dtype in (torch.float32, torch.float64) else 3e-2
    return isinstance(value, tuple) and math.isclose(
        float(answer.loss), mean_of(float(value[0]), float(count)), rel_tol=allowed
    )


def _skips_first(model: nn.Module) -> bool:
    """Return whether transformers' Trainer leaves each text's first label out of its count."""
    bare: Any = unwrapped(model)
    name: Any = getattr(bare, "loss_type", None)
    is_shifted = LOSS_MAPPING.get(name) is ForCausalLMLoss
    return is_shifted and not getattr(bare.config, "is_encoder_decoder", False)


def _with_divisor(loss: Loss, output: Tensor, target: Tensor, *, skips_first: bool) -> LossValue:
    value = loss(output, target)
    assert isinstance(value, tuple), "a loss of tokens is a (sum, count)"
    return value[0], (target[:, int(skips_first) :] != loss.ignore_index).sum()

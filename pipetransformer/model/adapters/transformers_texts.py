"""Give the adapters of transformers' text encoders their tasks, losses and masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopipe.loss import Loss
from pipetransformer.model.adapters.transformer import Family, refuse_own_loss
from pipetransformer.model.layered_model import Builders, LayeredModel, Sublayer
from pipetransformer.model.losses import classification_loss, span_loss, token_loss
from pipetransformer.model.modules import refuse_checkpointing

MASK = "attention_mask"


@dataclass(frozen=True)
class TextTask:
    """Say what a text encoder with a head is trained for.

    Args:
        model: how such models' class names end.
        loss_of: builds the loss from a model's configuration.
        padding_mask: of `LayeredModel`; None where the loss may depend on padding.
    """

    model: str
    targets: tuple[str, ...]
    loss_of: Callable[[Any], Loss]
    padding_mask: str | None = None

    def present(
        self,
        model: Any,
        sublayers: Sequence[Sublayer],
        inputs: Sequence[str],
        *,
        unused: Sequence[str] = (),
    ) -> LayeredModel:
        """Present a model as sublayers with the task's targets and loss."""
        return LayeredModel(
            model,
            sublayers,
            inputs=inputs,
            targets=self.targets,
            loss_fn=self.loss_of(model.config),
            unused=unused,
            padding_mask=self.padding_mask,
            optional_masks=(MASK,),
        )


TEXTS = TextTask("ForSequenceClassification", ("labels",), classification_loss, MASK)
TOKENS = TextTask(
    "ForTokenClassification",
    ("labels",),
    lambda config: Loss(
        token_loss,
        is_exact=True,
        smoothed=lambda share: Loss(partial(token_loss, label_smoothing=share), is_exact=True),
    ),
)
ANSWERS = TextTask(
    "ForQuestionAnswering",
    ("start_positions", "end_positions"),
    lambda config: Loss(span_loss, is_exact=True),
)

Build: TypeAlias = Callable[[Family, TextTask, Any], LayeredModel]
"""Presents a family's model that has a task's head."""


def text_builders(build: Build, *families: Family) -> Builders:
    """Return the builders of each family's models, by task."""
    return {
        family.qualified(task.model): partial(build, family, task)
        for family in families
        for task in (TEXTS, TOKENS, ANSWERS)
    }


def refuse_text_settings(model: Any) -> None:
    """Raise a ValueError for settings that sublayers, called one by one, would not follow."""
    refuse_checkpointing(model)
    refuse_own_loss(model)
    config = model.config
    if getattr(config, "is_decoder", False):
        raise ValueError(
            "config.is_decoder is True, but the adapter knows "
            f"{type(model).__name__} as an encoder; set it to False"
        )
    if config.chunk_size_feed_forward:
        raise ValueError(
            f"chunk_size_feed_forward is {config.chunk_size_feed_forward}, but would "
            "have no effect here; set it to 0 in the configuration"
        )
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"the attention implementation is {config._attn_implementation!r}; load "
            "the model with attn_implementation='sdpa' or 'eager'"
        )


def expanded_mask(
    mask: Tensor | None, hidden: Tensor, config: Any, *, reach: int | None = None
) -> Tensor | None:
    """Turn a (N, S) mask, 1 for tokens and 0 for padding, into the (N, 1, S, S) of attention.

    The model itself drops a mask without padding. Here that is done before, in host memory, for
    layers that train: a GPU would have to be waited for. Frozen layers keep their masks, as the
    last bits of a cached sample must not depend on its neighbours' padding.

    Args:
        reach: distance up to which tokens attend to each other; None for any distance.
    """
    length = hidden.shape[1]
    if mask is None:
        if reach is None:
            return None
        mask = hidden.new_ones((1, length))
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}; give (samples, tokens), "
            "1 for tokens and 0 for padding"
        )
    keep = mask.to(torch.bool)[:, None, None, :].expand(-1, 1, length, -1)
    if reach is not None:
        places = torch.arange(length, device=hidden.device)
        keep = keep & ((places[:, None] - places).abs() <= reach)
    # Read at each call, as set_attn_implementation may be called at any time.
    if config._attn_implementation == "sdpa":
        return keep
    lowest = torch.finfo(hidden.dtype).min
    return hidden.new_zeros(()).where(keep, lowest)

"""Cut a few texts short, to look at what a language model does and not at how long it takes.

whole    [prompt ........ | answer ......................... | padding]
cut                   [.. | answer ......]                                   8 tokens
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.model.forward.own_forward import Entries
from pipetransformer.model.modules import unwrapped

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_MOST_TOKENS = 8
"""Of a text that is looked at; logits of 128k words then take 4 MB a text in float32."""

_BY_TOKEN = {"input_ids", "attention_mask", "token_type_ids", "labels"}
_UNLABELLED = -100


def on_short_first(
    model: nn.Module, batch: Entries, look: Callable[[dict[str, Tensor]], _Result]
) -> _Result:
    """Look at a model with short texts; with whole ones where these are none, or it raises.

    What is refused is thus refused for whole samples, with their message.
    """
    short = _shortened(model, batch)
    if short is not None:
        try:
            return look(short)
        except Exception as error:
            _LOG.debug("%s is looked at with whole texts: %s", type(model).__name__, error)
    return look(dict(batch))


def _shortened(model: nn.Module, batch: Entries) -> dict[str, Tensor] | None:
    """Return texts of at most `_MOST_TOKENS` tokens; None for short ones, or fixed lengths.

    It is free for a causal language model whose batch holds ids, mask and labels of one length.
    Positions, images, or labels of spans may say where something stands, and are never cut. A
    text is cut around its first label, as a loss of no label has no gradient.

    Args:
        batch: (N, S) each, or (N,).
    """
    ids = batch.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.shape[1] <= _MOST_TOKENS or not _is_free(model):
        return None
    by_token = {name for name, entry in batch.items() if entry.ndim > 1}
    if by_token - _BY_TOKEN or any(batch[name].shape != ids.shape for name in by_token):
        return None
    at = _first_counted(batch).sub(_MOST_TOKENS // 2).clamp(0, ids.shape[1] - _MOST_TOKENS)
    places = at[:, None] + torch.arange(_MOST_TOKENS, device=ids.device)
    return {
        name: entry.gather(1, places) if name in by_token else entry
        for name, entry in batch.items()
    }


def _is_free(model: nn.Module) -> bool:
    """Return whether a model does the same with a text of any length."""
    base = unwrapped(model)
    config = getattr(base, "config", None)
    # Sparse attention is switched off by a short text, and rotations are scaled by a long one.
    scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    by_length = any(kind in str(scaling) for kind in ("dynamic", "longrope"))
    is_causal = type(base).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return is_causal and not by_length and not hasattr(config, "attention_type")


def _first_counted(batch: Entries) -> Tensor:
    """Return (N,) int64: the first token with a label, or else the first that is no padding."""
    ids, labels, mask = batch["input_ids"], batch.get("labels"), batch.get("attention_mask")
    counted = torch.ones_like(ids) if mask is None else mask
    if labels is not None and labels.shape == ids.shape:
        counted = labels != _UNLABELLED
    return counted.ne(0).int().argmax(1)

"""Present transformers' BERT for sequence classification and for question answering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.adapters.base import LayeredModel, Sublayer
from pipetransformer.adapters.transformer import (
    classification_loss,
    refuse_checkpointing,
    require_class,
    transformer_sublayers,
)
from pipetransformer.loss import Loss

MODULE = "transformers.models.bert.modeling_bert"
INPUTS = ("input_ids", "token_type_ids", "position_ids")


def build_sequence_classification(model: Any) -> LayeredModel:
    """Take apart a BertForSequenceClassification; Any, as transformers is not imported here."""
    head = nn.Sequential(model.bert.pooler, model.dropout, model.classifier)
    layered = LayeredModel(
        model,
        _sublayers(model, head),
        inputs=INPUTS,
        targets=("labels",),
        loss_fn=classification_loss(model.config),
    )
    layered.padding_mask = "attention_mask"  # The pooler takes the first position's state alone.
    return layered


def build_question_answering(model: Any) -> LayeredModel:
    """Take apart a BertForQuestionAnswering; a pooler, if any, has no part in its answers."""
    unused = [name for name, _ in model.named_parameters() if name.startswith("bert.pooler.")]
    return LayeredModel(
        model,
        _sublayers(model, model.qa_outputs),
        inputs=INPUTS,
        targets=("start_positions", "end_positions"),
        loss_fn=Loss(span_loss, is_exact=True),
        unused=unused,
    )


def span_loss(output: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of answers' starts and ends, and count both together.

    Args:
        output: (N, S, 2) start and end logits.
        target: start_positions and end_positions, (N,) or (N, 1) int64; positions from S on are
            beyond a truncated text and ignored.
    Source: BertForQuestionAnswering.forward of transformers, which halves the mean over starts
        plus the mean over ends. Ours is equal where as many starts as ends count. Where texts are
        cut within an answer it weighs all positions alike: two means cannot be joined from parts.
    """
    length = output.shape[1]
    total, count = output.new_zeros(()), output.new_zeros((), dtype=torch.int64)
    for column, name in enumerate(("start_positions", "end_positions")):
        positions = target[name].reshape(-1).clamp(0, length)
        total = total + F.cross_entropy(
            output[..., column], positions, ignore_index=length, reduction="sum"
        )
        count = count + (positions != length).sum()
    return total, count


def _sublayers(model: Any, head: nn.Module) -> tuple[Sublayer, ...]:
    bert = model.bert
    require_class(f"{MODULE}.BertModel", bert)
    _refuse_settings(model)
    require_class(f"{MODULE}.BertLayer", *bert.encoder.layer)
    blocks = [(_Attention(layer), _FeedForward(layer)) for layer in bert.encoder.layer]
    return transformer_sublayers(
        bert.embeddings, blocks, head, attention_sides=("attention_mask",)
    )


def _refuse_settings(model: Any) -> None:
    refuse_checkpointing(model)
    config = model.config
    if config.is_decoder:
        raise ValueError(
            "config.is_decoder is True, but the adapter knows BERT as an encoder; set it to False"
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


@final
class _Attention(nn.Module):
    """Attend to the unmasked tokens, add the residual and normalise: (N, S, D) to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = layer.attention

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None if attention_mask is None else self._expand(attention_mask, hidden)
        output: Tensor = self.attention(hidden, mask)[0]
        return output

    def _expand(self, mask: Tensor, hidden: Tensor) -> Tensor:
        """Turn a (N, S) mask, 1 for tokens and 0 for padding, into the (N, 1, S, S) of attention.

        Where no token is padding the model itself drops the mask. Not here: to ask stops a GPU,
        and a sample's numbers, in the last bits, would depend on the padding of its neighbours.
        """
        if mask.ndim != 2:
            raise ValueError(
                f"attention_mask is {tuple(mask.shape)}; give (samples, tokens), "
                "1 for tokens and 0 for padding"
            )
        length = hidden.shape[1]
        keep = mask.to(torch.bool)[:, None, None, :].expand(-1, 1, length, -1)
        # Read at each call: set_attn_implementation may have been called in between.
        if self.attention.self.config._attn_implementation == "sdpa":
            return keep
        lowest = torch.finfo(hidden.dtype).min
        return hidden.new_zeros(()).where(keep, lowest)


@final
class _FeedForward(nn.Module):
    """Apply a block's MLP, add the residual and normalise: (N, S, D) to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.intermediate = layer.intermediate
        self.output = layer.output

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.output(self.intermediate(hidden), hidden)
        return output

"""Present transformers' DistilBERT."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import Builders, LayeredModel
from pipetransformer.adapters.transformer import (
    Family,
    FirstToken,
    require_class,
    transformer_sublayers,
)
from pipetransformer.adapters.transformers_texts import (
    ANSWERS,
    MASK,
    TEXTS,
    TextTask,
    expanded_mask,
    refuse_text_settings,
    text_builders,
)

BLOCK = "transformers.models.distilbert.modeling_distilbert.TransformerBlock"
INPUTS = ("input_ids", "position_ids")


def builders() -> Builders:
    return text_builders(_build, Family("distilbert", "DistilBert", "distilbert"))


def _build(family: Family, task: TextTask, model: Any) -> LayeredModel:
    head = _head(task, model)
    encoder = family.encoder_of(model)
    refuse_text_settings(model)
    layers = encoder.transformer.layer
    require_class(BLOCK, *layers)
    blocks = [(_Attention(layer), _FeedForward(layer)) for layer in layers]
    sublayers = transformer_sublayers(encoder.embeddings, blocks, head, attention_sides=(MASK,))
    return task.present(model, sublayers, INPUTS)


def _head(task: TextTask, model: Any) -> nn.Module:
    if task is TEXTS:
        return nn.Sequential(
            FirstToken(), model.pre_classifier, nn.ReLU(), model.dropout, model.classifier
        )
    return nn.Sequential(model.dropout, model.qa_outputs if task is ANSWERS else model.classifier)


@final
class _Attention(nn.Module):
    """Attend to the unmasked tokens, add the residual and normalise: (N, S, D) to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = layer.attention
        self.norm = layer.sa_layer_norm

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = expanded_mask(attention_mask, hidden, self.attention.config)
        output: Tensor = self.norm(self.attention(hidden, attention_mask=mask)[0] + hidden)
        return output


@final
class _FeedForward(nn.Module):
    """Apply a block's MLP, add the residual and normalise: (N, S, D) to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.ffn = layer.ffn
        self.norm = layer.output_layer_norm

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(self.ffn(hidden) + hidden)
        return output

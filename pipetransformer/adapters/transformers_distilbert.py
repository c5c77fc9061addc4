"""Present transformers' DistilBERT."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import Builders, LayeredModel, Sublayer
from pipetransformer.adapters.transformer import FirstToken, require_class
from pipetransformer.adapters.transformers_texts import (
    answers_questions,
    classifies_texts,
    classifies_tokens,
    expanded_mask,
    refuse_text_settings,
    text_sublayers,
)

MODULE = "transformers.models.distilbert.modeling_distilbert"
INPUTS = ("input_ids", "position_ids")


def builders() -> Builders:
    """Return what takes the models of each class apart."""
    return {
        f"{MODULE}.DistilBertForSequenceClassification": _build_sequence_classification,
        f"{MODULE}.DistilBertForTokenClassification": _build_token_classification,
        f"{MODULE}.DistilBertForQuestionAnswering": _build_question_answering,
    }


def _build_sequence_classification(model: Any) -> LayeredModel:
    head = nn.Sequential(
        FirstToken(), model.pre_classifier, nn.ReLU(), model.dropout, model.classifier
    )
    return classifies_texts(model, _sublayers(model, head), INPUTS)


def _build_token_classification(model: Any) -> LayeredModel:
    head = nn.Sequential(model.dropout, model.classifier)
    return classifies_tokens(model, _sublayers(model, head), INPUTS)


def _build_question_answering(model: Any) -> LayeredModel:
    head = nn.Sequential(model.dropout, model.qa_outputs)
    return answers_questions(model, _sublayers(model, head), INPUTS)


def _sublayers(model: Any, head: nn.Module) -> tuple[Sublayer, ...]:
    encoder = model.distilbert
    require_class(f"{MODULE}.DistilBertModel", encoder)
    refuse_text_settings(model)
    layers = encoder.transformer.layer
    require_class(f"{MODULE}.TransformerBlock", *layers)
    blocks = [(_Attention(layer), _FeedForward(layer)) for layer in layers]
    return text_sublayers(encoder.embeddings, blocks, head)


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

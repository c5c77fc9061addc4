"""Present transformers' BERT and those with its very blocks: RoBERTa, XLM-RoBERTa, ELECTRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import Builders, LayeredModel, Sublayer
from pipetransformer.adapters.transformer import Family, require_class
from pipetransformer.adapters.transformers_texts import (
    answers_questions,
    classifies_texts,
    classifies_tokens,
    expanded_mask,
    refuse_text_settings,
    text_sublayers,
)

INPUTS = ("input_ids", "token_type_ids", "position_ids")


_FAMILIES = (
    Family("bert", "Bert", "bert"),
    Family("roberta", "Roberta", "roberta"),
    Family("xlm_roberta", "XLMRoberta", "roberta"),
    Family("electra", "Electra", "electra"),
)


def builders() -> Builders:
    """Return what takes the models of each class apart."""
    return {
        family.qualified(f"For{task}"): partial(build, family)
        for family in _FAMILIES
        for task, build in _TASKS.items()
    }


def _build_sequence_classification(family: Family, model: Any) -> LayeredModel:
    head = model.classifier  # It takes the first token's state itself, or after BERT's pooler.
    if family.prefix == "Bert":
        head = nn.Sequential(model.bert.pooler, model.dropout, model.classifier)
    return classifies_texts(model, _sublayers(family, model, head), INPUTS)


def _build_token_classification(family: Family, model: Any) -> LayeredModel:
    sublayers = _sublayers(family, model, nn.Sequential(model.dropout, model.classifier))
    return classifies_tokens(model, sublayers, INPUTS, unused=_pooler(family, model))


def _build_question_answering(family: Family, model: Any) -> LayeredModel:
    sublayers = _sublayers(family, model, model.qa_outputs)
    return answers_questions(model, sublayers, INPUTS, unused=_pooler(family, model))


def _pooler(family: Family, model: nn.Module) -> list[str]:
    """Name the parameters of a pooler, if there is one, that has no part in the answer."""
    prefix = f"{family.encoder}.pooler."
    return [name for name, _ in model.named_parameters() if name.startswith(prefix)]


def _sublayers(family: Family, model: Any, head: nn.Module) -> tuple[Sublayer, ...]:
    encoder = family.encoder_of(model)
    refuse_text_settings(model)
    layers = encoder.encoder.layer
    require_class(family.qualified("Layer"), *layers)
    blocks = [(_Attention(layer), _FeedForward(layer)) for layer in layers]
    embeddings = encoder.embeddings
    if hasattr(encoder, "embeddings_project"):
        embeddings = _Projected(embeddings, encoder.embeddings_project)
    return text_sublayers(embeddings, blocks, head)


_TASKS: Mapping[str, Callable[[Family, Any], LayeredModel]] = {
    "SequenceClassification": _build_sequence_classification,
    "TokenClassification": _build_token_classification,
    "QuestionAnswering": _build_question_answering,
}


@final
class _Projected(nn.Module):
    """Embed tokens, and widen what comes of it: (N, S) to (N, S, D)."""

    def __init__(self, embeddings: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.projection = embeddings, projection

    def forward(self, input_ids: Tensor, **further: Tensor) -> Tensor:
        hidden: Tensor = self.projection(self.embeddings(input_ids, **further))
        return hidden


@final
class _Attention(nn.Module):
    """Attend to the unmasked tokens, add the residual and normalise: (N, S, D) to the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention = layer.attention

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = expanded_mask(attention_mask, hidden, self.attention.self.config)
        output: Tensor = self.attention(hidden, mask)[0]
        return output


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

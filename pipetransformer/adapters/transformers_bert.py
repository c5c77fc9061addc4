"""Present transformers' BERT, and those that have its very blocks: RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import Builders, LayeredModel, Sublayer
from pipetransformer.adapters.transformer import require_class
from pipetransformer.adapters.transformers_texts import (
    answers_questions,
    classifies_texts,
    classifies_tokens,
    expanded_mask,
    refuse_text_settings,
    text_sublayers,
)

INPUTS = ("input_ids", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class _Family:
    """Say how models of one kind are called.

    Args:
        package: of transformers.models.
        prefix: of its classes' names.
        encoder: the attribute of a model that holds its encoder.
    """

    package: str
    prefix: str
    encoder: str

    def qualified(self, name: str) -> str:
        """Spell one of its classes as "module.Class"."""
        module = f"transformers.models.{self.package}.modeling_{self.package}"
        return f"{module}.{self.prefix}{name}"

    def sublayers(self, model: Any, head: nn.Module) -> tuple[Sublayer, ...]:
        """Take the encoder apart."""
        encoder = getattr(model, self.encoder)
        require_class(self.qualified("Model"), encoder)
        refuse_text_settings(model)
        layers = encoder.encoder.layer
        require_class(self.qualified("Layer"), *layers)
        blocks = [(_Attention(layer), _FeedForward(layer)) for layer in layers]
        return text_sublayers(encoder.embeddings, blocks, head)

    def pooler(self, model: nn.Module) -> list[str]:
        """Name a pooler's parameters, where the encoder has one that has no part in the answer."""
        prefix = f"{self.encoder}.pooler."
        return [name for name, _ in model.named_parameters() if name.startswith(prefix)]


_FAMILIES = (
    _Family("bert", "Bert", "bert"),
    _Family("roberta", "Roberta", "roberta"),
    _Family("xlm_roberta", "XLMRoberta", "roberta"),
)


def builders() -> Builders:
    """Return what takes the models of each class apart."""
    return {
        family.qualified(f"For{task}"): partial(build, family)
        for family in _FAMILIES
        for task, build in _TASKS.items()
    }


def _build_sequence_classification(family: _Family, model: Any) -> LayeredModel:
    head = model.classifier  # It takes the first token's state itself, or after BERT's pooler.
    if family.prefix == "Bert":
        head = nn.Sequential(model.bert.pooler, model.dropout, model.classifier)
    return classifies_texts(model, family.sublayers(model, head), INPUTS)


def _build_token_classification(family: _Family, model: Any) -> LayeredModel:
    sublayers = family.sublayers(model, nn.Sequential(model.dropout, model.classifier))
    return classifies_tokens(model, sublayers, INPUTS, unused=family.pooler(model))


def _build_question_answering(family: _Family, model: Any) -> LayeredModel:
    sublayers = family.sublayers(model, model.qa_outputs)
    return answers_questions(model, sublayers, INPUTS, unused=family.pooler(model))


_TASKS: Mapping[str, Callable[[_Family, Any], LayeredModel]] = {
    "SequenceClassification": _build_sequence_classification,
    "TokenClassification": _build_token_classification,
    "QuestionAnswering": _build_question_answering,
}


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

"""Present transformers' BERT, models with the same blocks (RoBERTa, ELECTRA), and DistilBERT."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from pipetransformer.model.adapters.transformer import (
    Family,
    FirstToken,
    Residual,
    require_class,
    transformer_sublayers,
)
from pipetransformer.model.adapters.transformers_texts import (
    ANSWERS,
    MASK,
    TEXTS,
    TOKENS,
    TextTask,
    expanded_mask,
    refuse_text_settings,
    text_builders,
)
from pipetransformer.model.layered_model import Builders, LayeredModel

INPUTS = ("input_ids", "token_type_ids", "position_ids")


def builders() -> Builders:
    families = (
        Family("bert", "Bert", "bert"),
        Family("roberta", "Roberta", "roberta"),
        Family("xlm_roberta", "XLMRoberta", "roberta"),
        Family("camembert", "Camembert", "roberta"),
        Family("electra", "Electra", "electra"),
    )
    distilled = Family("distilbert", "DistilBert", "distilbert")
    return {**text_builders(_build, *families), **text_builders(_build_distilled, distilled)}


def _build(family: Family, task: TextTask, model: Any) -> LayeredModel:
    head = _head(family, task, model)
    encoder = family.encoder_of(model)
    refuse_text_settings(model)
    layers = encoder.encoder.layer
    require_class(family.qualified("Encoder"), encoder.encoder)
    require_class(family.qualified("Layer"), *layers)
    blocks = [(_Attention(layer), _FeedForward(layer)) for layer in layers]
    embeddings = encoder.embeddings
    if hasattr(encoder, "embeddings_project"):
        embeddings = _Projected(embeddings, encoder.embeddings_project)
    sublayers = transformer_sublayers(embeddings, blocks, head, attention_sides=(MASK,))
    # A pooler has no part in the outputs of tokens.
    names = [name for name, _ in model.named_parameters()] if task is not TEXTS else []
    unused = [name for name in names if name.startswith(f"{family.encoder}.pooler.")]
    return task.present(model, sublayers, INPUTS, unused=unused)


def _build_distilled(family: Family, task: TextTask, model: Any) -> LayeredModel:
    head = nn.Sequential(model.dropout, model.qa_outputs if task is ANSWERS else model.classifier)
    if task is TEXTS:
        head = nn.Sequential(FirstToken(), model.pre_classifier, nn.ReLU(), *head)
    encoder = family.encoder_of(model)
    refuse_text_settings(model)
    layers = encoder.transformer.layer
    module = "transformers.models.distilbert.modeling_distilbert"
    require_class(f"{module}.Transformer", encoder.transformer)
    require_class(f"{module}.TransformerBlock", *layers)
    blocks = [
        (_DistilledAttention(layer), nn.Sequential(Residual(layer.ffn), layer.output_layer_norm))
        for layer in layers
    ]
    sublayers = transformer_sublayers(encoder.embeddings, blocks, head, attention_sides=(MASK,))
    return task.present(model, sublayers, ("input_ids", "position_ids"))


def _head(family: Family, task: TextTask, model: Any) -> Any:
    if task is ANSWERS:
        return model.qa_outputs
    if task is TOKENS:
        return nn.Sequential(model.dropout, model.classifier)
    if family.prefix == "Bert":
        return nn.Sequential(model.bert.pooler, model.dropout, model.classifier)
    return model.classifier  # It takes the first token's state itself.


@final
class _Projected(nn.Module):
    """Embed tokens, and widen their embeddings: (N, S) to (N, S, D)."""

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
class _DistilledAttention(nn.Module):
    """As `_Attention`; DistilBERT adds and normalises in its block, so here."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention, self.norm = layer.attention, layer.sa_layer_norm

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = expanded_mask(attention_mask, hidden, self.attention.config)
        output: Tensor = self.norm(self.attention(hidden, attention_mask=mask)[0] + hidden)
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

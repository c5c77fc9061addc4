"""Present transformers' ViTForImageClassification."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import LayeredModel
from pipetransformer.adapters.transformer import (
    Residual,
    classification_loss,
    refuse_checkpointing,
    require_class,
    transformer_sublayers,
)

MODULE = "transformers.models.vit.modeling_vit"


def build(model: Any) -> LayeredModel:
    """Take apart a ViTForImageClassification; Any, as transformers is not imported here.

    Raises:
        TypeError: the encoder or a block is not transformers' own class.
        ValueError: gradient checkpointing is on, or transformers is too old.
    """
    vit = model.vit
    require_class(vit, f"{MODULE}.ViTModel")
    refuse_checkpointing(model)
    if "layers" not in dict(vit.named_children()):
        raise ValueError(
            "this ViTModel has the structure of an old transformers; upgrade "
            "transformers to 5.12 or newer"
        )
    for layer in vit.layers:
        require_class(layer, f"{MODULE}.ViTLayer")
    blocks = [
        (_Attention(layer), Residual(layer.layernorm_after, layer.mlp, layer.dropout))
        for layer in vit.layers
    ]
    sublayers = transformer_sublayers(_Embedding(vit), blocks, _Head(model))
    return LayeredModel(
        model,
        sublayers,
        inputs=("pixel_values",),
        targets=("labels",),
        loss_fn=classification_loss(model.config),
    )


@final
class _Embedding(nn.Module):
    """Embed images (N, C, H, W), of whatever float dtype, as (N, S, D)."""

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.embeddings = vit.embeddings

    def forward(self, pixel_values: Tensor) -> Tensor:
        dtype = self.embeddings.patch_embeddings.projection.weight.dtype
        hidden: Tensor = self.embeddings(pixel_values.to(dtype))
        return hidden


@final
class _Attention(nn.Module):
    """Add a block's attention to the hidden state; it returns its weights too, so no Residual."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm = layer.layernorm_before
        self.attention = layer.attention
        self.dropout = layer.dropout

    def forward(self, hidden: Tensor) -> Tensor:
        attended, _ = self.attention(self.norm(hidden))
        output: Tensor = hidden + self.dropout(attended)
        return output


@final
class _Head(nn.Module):
    """Normalise and classify the first token: (N, S, D) to (N, labels)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.vit.layernorm
        self.classifier = model.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.norm(hidden)[:, 0])
        return logits

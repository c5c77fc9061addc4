"""Present transformers' ViTForImageClassification."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from pipetransformer.adapters.base import LayeredModel
from pipetransformer.adapters.transformer import (
    FirstOf,
    FirstToken,
    Residual,
    classification_loss,
    refuse_checkpointing,
    require_class,
    transformer_sublayers,
)

MODULE = "transformers.models.vit.modeling_vit"


def build(model: Any) -> LayeredModel:
    """Take apart a ViTForImageClassification; Any, as transformers is not imported here."""
    vit = model.vit
    require_class(f"{MODULE}.ViTModel", vit)
    refuse_checkpointing(model)
    if hasattr(model, "_loss_function"):
        raise ValueError(
            "model.loss_function was set, and would not be called; give loss_fn= to "
            "pipetransformer.Trainer"
        )
    require_class(f"{MODULE}.ViTLayer", *vit.layers)
    blocks = [
        (
            Residual(layer.layernorm_before, FirstOf(layer.attention), layer.dropout),
            Residual(layer.layernorm_after, layer.mlp, layer.dropout),
        )
        for layer in vit.layers
    ]
    head = nn.Sequential(vit.layernorm, FirstToken(), model.classifier)
    sublayers = transformer_sublayers(_Embedding(vit), blocks, head)
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

"""Present transformers' vision transformers for image classification: ViT, DeiT and DINOv2."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from pipetransformer.model.adapters.transformer import (
    Family,
    FirstOf,
    FirstToken,
    Residual,
    refuse_own_loss,
    require_class,
    transformer_sublayers,
)
from pipetransformer.model.layered_model import Builders, LayeredModel, Sublayer
from pipetransformer.model.losses import classification_loss
from pipetransformer.model.modules import refuse_checkpointing


def builders() -> Builders:
    return {
        family.qualified("ForImageClassification"): partial(build, family)
        for family, build in _FAMILIES.items()
    }


def _build_vit(family: Family, model: Any) -> LayeredModel:
    vit = family.encoder_of(model)
    require_class(family.qualified("Layer"), *vit.layers)
    blocks = [
        (
            Residual(layer.layernorm_before, FirstOf(layer.attention), layer.dropout),
            Residual(layer.layernorm_after, layer.mlp, layer.dropout),
        )
        for layer in vit.layers
    ]
    head = nn.Sequential(vit.layernorm, FirstToken(), model.classifier)
    return _classifier(model, transformer_sublayers(_Embedding(vit), blocks, head))


def _build_dino(family: Family, model: Any) -> LayeredModel:
    dino = family.encoder_of(model)
    require_class(family.qualified("Layer"), *dino.encoder.layer)
    blocks = [
        (
            Residual(layer.norm1, FirstOf(layer.attention), layer.layer_scale1, layer.drop_path),
            Residual(layer.norm2, layer.mlp, layer.layer_scale2, layer.drop_path),
        )
        for layer in dino.encoder.layer
    ]
    registers = getattr(model.config, "num_register_tokens", 0)
    head = nn.Sequential(dino.layernorm, _FirstAndMean(1 + registers), model.classifier)
    return _classifier(model, transformer_sublayers(_Embedding(dino), blocks, head))


def _classifier(model: Any, sublayers: tuple[Sublayer, ...]) -> LayeredModel:
    refuse_checkpointing(model)
    refuse_own_loss(model)
    return LayeredModel(
        model,
        sublayers,
        inputs=("pixel_values",),
        targets=("labels",),
        loss_fn=classification_loss(model.config),
    )


_FAMILIES = {
    Family("vit", "ViT", "vit"): _build_vit,
    Family("deit", "DeiT", "deit"): _build_vit,
    Family("dinov2", "Dinov2", "dinov2"): _build_dino,
    Family("dinov2_with_registers", "Dinov2WithRegisters", "dinov2_with_registers"): _build_dino,
}


@final
class _Embedding(nn.Module):
    """Embed images (N, C, H, W), of any float dtype, as (N, S, D)."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.embeddings = encoder.embeddings

    def forward(self, pixel_values: Tensor) -> Tensor:
        dtype = self.embeddings.patch_embeddings.projection.weight.dtype
        hidden: Tensor = self.embeddings(pixel_values.to(dtype))
        return hidden


@final
class _FirstAndMean(nn.Module):
    """Join the first token and the mean of the patches' tokens: (N, S, D) to (N, 2 D)."""

    def __init__(self, first_patch: int) -> None:
        super().__init__()
        self._first_patch = first_patch

    def forward(self, hidden: Tensor) -> Tensor:
        patches = hidden[:, self._first_patch :]
        return torch.cat([hidden[:, 0], patches.mean(dim=1)], dim=1)

"""Present timm's VisionTransformer: patch embedding, attention and MLP of each block, head."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.adapters.base import LayeredModel
from pipetransformer.adapters.transformer import (
    Residual,
    qualified_name,
    refuse_checkpointing,
    require_class,
    transformer_sublayers,
)

MODULE = "timm.models.vision_transformer"
CLASS = f"{MODULE}.VisionTransformer"


def build(model: Any) -> LayeredModel:
    """Take apart a VisionTransformer of timm 1.0; Any, as timm is not imported here.

    Class, register and pooling variants are all in: positions and pooling are the model's own.
    """
    if qualified_name(type(model).forward_features) != f"{CLASS}.forward_features":
        raise TypeError(
            f"{type(model).__name__} overrides forward_features of VisionTransformer, "
            "which its adapter stands for; build a LayeredModel for it yourself"
        )
    refuse_checkpointing(model)
    require_class(f"{MODULE}.Block", *model.blocks)
    blocks = [
        (
            Residual(block.norm1, block.attn, block.ls1, block.drop_path1),
            Residual(block.norm2, block.mlp, block.ls2, block.drop_path2),
        )
        for block in model.blocks
    ]
    sublayers = transformer_sublayers(_Embedding(model), blocks, _Head(model))
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",), loss_fn=F.cross_entropy)


@final
class _Embedding(nn.Module):
    """Cut images (N, C, H, W) into patches and add positions and prefix tokens: (N, S, D)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.patch_embed = model.patch_embed
        # Held here so that they belong to this sublayer; read by the method of the model below,
        # which, being no module, does not register the rest of the model here.
        self.cls_token = model.cls_token
        self.reg_token = model.reg_token
        self.pos_embed = model.pos_embed
        self.pos_drop = model.pos_drop
        self.add_positions = model._pos_embed
        self.patch_drop = model.patch_drop
        self.norm_pre = model.norm_pre

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm_pre(self.patch_drop(self.add_positions(self.patch_embed(x))))
        return hidden


@final
class _Head(nn.Module):
    """Normalise, pool and classify: (N, S, D) to (N, classes)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.norm
        self.attn_pool = model.attn_pool
        self.fc_norm = model.fc_norm
        self.head_drop = model.head_drop
        self.head = model.head
        self.pool_and_classify = model.forward_head

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.pool_and_classify(self.norm(hidden))
        return output

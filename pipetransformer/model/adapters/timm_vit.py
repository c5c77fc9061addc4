"""Present timm's VisionTransformer: patch embedding, attention and MLP of each block, head."""

from __future__ import annotations

from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.model.adapters.transformer import (
    Residual,
    require_class,
    transformer_sublayers,
)
from pipetransformer.model.layered_model import LayeredModel
from pipetransformer.model.modules import qualified_name, refuse_checkpointing, refuse_replaced

MODULE = "timm.models.vision_transformer"
CLASS = f"{MODULE}.VisionTransformer"


def build(model: Any) -> LayeredModel:
    """Present a VisionTransformer of timm 1.0; Any, as timm is not imported here.

    Class tokens, registers, positions and pooling are the model's own methods, whatever variant.
    """
    if qualified_name(type(model).forward_features) != f"{CLASS}.forward_features":
        raise TypeError(
            f"{type(model).__name__} overrides forward_features of VisionTransformer, "
            "which its adapter stands for; build a LayeredModel for it yourself"
        )
    if getattr(model, "dist_token", None) is not None:
        raise ValueError(
            f"this {type(model).__name__} has a token and a head for distillation, which the "
            "adapter of VisionTransformer does not know; give a model without them, such as "
            "deit_small_patch16_224 instead of deit_small_distilled_patch16_224"
        )
    refuse_checkpointing(model)
    require_class(f"{MODULE}.Block", *model.blocks)
    refuse_replaced(model)
    blocks = [
        (
            Residual(block.norm1, block.attn, block.ls1, block.drop_path1),
            Residual(block.norm2, block.mlp, block.ls2, block.drop_path2),
        )
        for block in model.blocks
    ]
    embedding = _Chain(
        model,
        ("patch_embed", "_pos_embed", "patch_drop", "norm_pre"),
        reads=("cls_token", "reg_token", "pos_embed", "pos_drop"),
    )
    head = _Chain(
        model, ("norm", "forward_head"), reads=("attn_pool", "fc_norm", "head_drop", "head")
    )
    sublayers = transformer_sublayers(embedding, blocks, head)
    return LayeredModel(model, sublayers, inputs=("x",), targets=("y",), loss_fn=F.cross_entropy)


@final
class _Chain(nn.Module):
    """Call some of the model's modules and methods, named in order, one on another's output.

    A method registers none of the parameters it `reads` here, so these are held by name: they must
    belong to this sublayer.
    """

    def __init__(self, model: Any, calls: tuple[str, ...], *, reads: tuple[str, ...]) -> None:
        super().__init__()
        self.calls = calls
        for name in (*calls, *reads):
            setattr(self, name, getattr(model, name))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.calls:
            x = getattr(self, name)(x)
        return x

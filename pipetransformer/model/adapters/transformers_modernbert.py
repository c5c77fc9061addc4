"""Present transformers' ModernBERT: rotary positions, and most blocks attend within a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from pipetransformer.model.adapters.transformer import (
    Family,
    FirstToken,
    Residual,
    require_class,
    transformer_sublayers,
)
from pipetransformer.model.adapters.transformers_texts import (
    MASK,
    TEXTS,
    TextTask,
    expanded_mask,
    refuse_text_settings,
    text_builders,
)
from pipetransformer.model.layered_model import Builders, LayeredModel, Sublayer

INPUTS, POSITIONS = ("input_ids",), "position_ids"


def builders() -> Builders:
    return text_builders(_build, Family("modernbert", "ModernBert", "model"))


def _build(family: Family, task: TextTask, model: Any) -> LayeredModel:
    if task is TEXTS and model.config.classifier_pooling == "mean":
        *below, head = _sublayers(family, model, _MeanHead(model))
        sublayers = (*below, replace(head, sides=(MASK,)))
    else:
        pooling = [FirstToken()] if task is TEXTS else []
        modules = model.model.final_norm, *pooling, model.head, model.drop, model.classifier
        sublayers = _sublayers(family, model, nn.Sequential(*modules))
    # The model's own rotary module is not called: each block makes its rotations.
    names = [name for name, _ in model.named_buffers()]
    unused = [name for name in names if name.startswith("model.rotary_emb.")]
    return task.present(model, sublayers, INPUTS, unused=unused)


def _sublayers(family: Family, model: Any, head: nn.Module) -> tuple[Sublayer, ...]:
    encoder = family.encoder_of(model)
    refuse_text_settings(model)
    require_class(family.qualified("EncoderLayer"), *encoder.layers)
    kinds = encoder.rotary_emb.rope_type
    if other := sorted(set(kinds.values()) - {"default"}):
        raise ValueError(f"rope_parameters ask for {other}; the adapter knows 'default' alone")
    blocks = [
        (_Attention(layer, encoder.rotary_emb), Residual(layer.mlp_norm, layer.mlp))
        for layer in encoder.layers
    ]
    sides = (MASK, POSITIONS)
    return transformer_sublayers(encoder.embeddings, blocks, head, attention_sides=sides)


@final
class _Attention(nn.Module):
    """Attend to the unmasked tokens, all or near ones, and add: (N, S, D) to the same.

    Source: ModernBertModel.forward of transformers, which makes masks and rotations once for all
        blocks. Ours makes them in each, as blocks may be on different devices.
    """

    def __init__(self, layer: Any, rotary: Any) -> None:
        super().__init__()
        self.norm, self.attention = layer.attn_norm, layer.attn
        self._is_near = layer.attention_type == "sliding_attention"
        # No buffer: it would be one tensor in many sublayers, which may be on different devices.
        frequencies = getattr(rotary, f"{layer.attention_type}_inv_freq").float().cpu()
        self._frequencies = {torch.device("cpu"): frequencies}

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        config = self.attention.config
        reach = config.sliding_window if self._is_near else None
        mask = expanded_mask(attention_mask, hidden, config, reach=reach)
        rotation = self._rotation(hidden, position_ids)
        output: Tensor = self.attention(self.norm(hidden), rotation, mask)[0]
        return hidden + output

    def _rotation(self, hidden: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions' angles, (N or 1, S, head's D) each."""
        device = hidden.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=device)[None]
        angles = (positions[..., None].float() * self._frequencies[device]).repeat(1, 1, 2)
        dtype = self.attention.Wqkv.weight.dtype  # As the model itself: autocast has no say.
        return angles.cos().to(dtype), angles.sin().to(dtype)


@final
class _MeanHead(nn.Module):
    """Classify by the mean over the tokens that are no padding: (N, S, D) to (N, classes)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.final_norm
        self.head = nn.Sequential(model.head, model.drop, model.classifier)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.norm(hidden)
        if attention_mask is None:
            attention_mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool)
        total = (hidden * attention_mask[..., None]).sum(dim=1)
        output: Tensor = self.head(total / attention_mask.sum(dim=1, keepdim=True))
        return output

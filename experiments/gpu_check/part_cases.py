"""Describe four models of which a part is frozen, and samples that they take.

    whisper   the encoder; the decoder trains
    resnet    ResNet-18 below a linear head
    clip      the tower of images; that of texts trains
    smolvlm   the vision tower, four tiles a sample; the language model trains

Weights are random, and nothing drops out. On one core a part is most of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.gpu_check.workloads import (
    EPS,
    NUM_CLASSES,
    LoopCase,
    image_loss,
    own_loss,
    random_images,
)
from experiments.random_models import Headed

Items = list[dict[str, Tensor]]

_WORDS, _IMAGE = 200, 5
_TILES, _TOKENS = 4, 8
"""Tiles a sample of the VLM, and tokens of a text."""


@dataclass(frozen=True)
class PartCase(LoopCase):
    """Describe what loops train; in place of a list of blocks a module freezes.

    Args:
        blocks: that module's name.
        field: what the model reads of the part's answer; None where that is a tensor.
        entries: that the part returns for a sample.
    """

    num_frozen: int = 1
    autocast_to: torch.dtype | None = None
    eps: float = EPS
    field: str | None = None
    entries: int = 1

    def in_dtype(self, dtype: torch.dtype) -> PartCase:
        """Return the case with weights and samples in a dtype."""
        rows = [
            {name: one.to(dtype) if one.is_floating_point() else one for name, one in row.items()}
            for row in self.rows
        ]
        return replace(self, build=lambda: self.build().to(dtype), rows=rows)


@dataclass(frozen=True)
class Size:
    """Say how large models and images are, and how many samples there are.

    Args:
        width, depth: of the frozen encoders; `small` is the width of what trains.
        pixels: of an image's side.
    """

    width: int
    depth: int
    small: int
    pixels: int
    batch_size: int
    steps: int


TINY = Size(width=32, depth=2, small=16, pixels=32, batch_size=4, steps=4)
ONE_CORE = Size(width=192, depth=6, small=64, pixels=64, batch_size=16, steps=32)
LARGE = Size(width=768, depth=12, small=256, pixels=224, batch_size=32, steps=12)


def part_cases(size: Size) -> list[PartCase]:
    """Return the four of a size."""
    return [_whisper(size), _resnet(size), _clip(size), _smolvlm(size)]


def _encoder(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width, "intermediate_size": 4 * size.width,
        "num_hidden_layers": size.depth, "num_attention_heads": size.width // 16,
        "image_size": size.pixels, "patch_size": _patch(size),
    }  # fmt: skip


def _patch(size: Size) -> int:
    return max(8, size.pixels // 14)


def _decoder(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.small, "intermediate_size": 4 * size.small, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": _WORDS, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0,
    }  # fmt: skip


def _items(columns: dict[str, Tensor]) -> Items:
    """Return a list of samples: where it holds labels is known, as of most data sets."""
    num = len(next(iter(columns.values())))
    return [{name: column[n] for name, column in columns.items()} for n in range(num)]


def _words(num: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(_IMAGE + 1, _WORDS, (num, length), generator=generator)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _whisper(size: Size) -> PartCase:
    num, positions = size.batch_size * size.steps, 3 * size.pixels // 2
    rows = _items(
        {"input_features": _noise(num, 16, 2 * positions), "labels": _words(num, _TOKENS)}
    )
    build, part = partial(_build_whisper, size, positions), "model.encoder"
    return PartCase(
        "whisper", build, part, rows, own_loss, size.batch_size, field="last_hidden_state"
    )


def _build_whisper(size: Size, positions: int) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=_WORDS, num_mel_bins=16, d_model=size.width, encoder_layers=size.depth,
        decoder_layers=1, encoder_attention_heads=size.width // 16,
        decoder_attention_heads=size.width // 16, encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=size.width, max_source_positions=positions, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _build_headed() -> nn.Module:
    import timm

    torch.manual_seed(0)
    backbone: Any = timm.create_model("resnet18", num_classes=0)
    return Headed(backbone, backbone.num_features, NUM_CLASSES)


def _resnet(size: Size) -> PartCase:
    rows = _items(random_images(size.batch_size * size.steps, size.pixels).columns)
    return PartCase("resnet", _build_headed, "backbone", rows, image_loss, size.batch_size)


def _clip(size: Size) -> PartCase:
    num = size.batch_size * size.steps
    rows = _items({
        "pixel_values": _noise(num, 3, size.pixels, size.pixels),
        "input_ids": _words(num, _TOKENS),
    })  # fmt: skip
    part, field = "vision_model", "pooler_output"
    return PartCase(
        "clip", partial(_build_clip, size), part, rows, _match_loss, size.batch_size, field=field
    )


def _build_clip(size: Size) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    texts = {**_decoder(size), "max_position_embeddings": _TOKENS, "projection_dim": 32}
    images = {**_encoder(size), "projection_dim": 32}
    return CLIPModel(CLIPConfig(text_config=texts, vision_config=images, projection_dim=32))


def _match_loss(model: nn.Module, batch: Any) -> Tensor:
    scores = model(**batch).logits_per_text
    return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _smolvlm(size: Size) -> PartCase:
    # As many patches as the others' encoders see, in four tiles a sample.
    batch = max(2, size.batch_size // _TILES)
    num = batch * size.steps
    of_tile = (size.pixels // _patch(size) // 2) ** 2  # Two by two patches are a token.
    ids = _words(num, _TILES * of_tile + _TOKENS)
    ids[:, : _TILES * of_tile] = _IMAGE
    rows = _items({
        "pixel_values": _noise(num, _TILES, 3, size.pixels, size.pixels),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == _IMAGE, -100),
    })  # fmt: skip
    return PartCase(
        "smolvlm", partial(_build_smolvlm, size), "model.vision_model", rows, own_loss, batch,
        field="last_hidden_state", entries=_TILES,
    )  # fmt: skip


def _build_smolvlm(size: Size) -> nn.Module:
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMVisionConfig
    from transformers import SmolVLMForConditionalGeneration as SmolVLM

    torch.manual_seed(0)
    texts = LlamaConfig(**_decoder(size), num_key_value_heads=2)
    images = SmolVLMVisionConfig(**_encoder(size))
    others: dict[str, Any] = {"image_token_id": _IMAGE, "scale_factor": 2, "pad_token_id": 0}
    return SmolVLM(SmolVLMConfig(vision_config=images, text_config=texts, **others))

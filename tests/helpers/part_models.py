"""Models of which a part is frozen, tiny and random, with samples that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

NUM_SAMPLES = 12
_WORDS, _CLASSES = 60, 5


class Samples(Dataset[dict[str, Tensor]]):
    """Give entries by sample."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


@dataclass(frozen=True)
class PartCase:
    """Describe a model, its frozen parts, and samples.

    Args:
        loss: of a batch.
        sees: modules within the parts whose calls are counted, by name.
        collate: makes batches; None is torch's own way.
    """

    build: Callable[[], nn.Module]
    parts: tuple[str, ...]
    data: Callable[[], Any]
    loss: Callable[[nn.Module, Mapping[str, Any]], Tensor]
    sees: tuple[str, ...]
    collate: Callable[[list[Any]], Any] | None = None


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad texts to the longest of the batch; images are stacked."""
    batch = {}
    for name in items[0]:
        value = {"labels": -100, "input_ids": 0}.get(name, 0)
        rows = [item[name] for item in items]
        is_text = rows[0].ndim == 1
        batch[name] = (
            pad_sequence(rows, batch_first=True, padding_value=value)
            if is_text
            else torch.stack(rows)
        )
    return batch


def padded_by_8(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad texts to a multiple of 8 positions, as for tensor cores."""
    return {
        name: pad(one, (0, -one.shape[1] % 8), value=-100 if name == "labels" else 0)
        for name, one in padded(items).items()
    }


class Texts(Dataset[dict[str, Tensor]]):
    """Give samples with texts of unequal lengths."""

    def __init__(self, whole: Samples) -> None:
        self._whole = whole

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        num = 6 + index % 5
        item = self._whole[index]
        return {n: one[:num] if one.ndim == 1 else one for n, one in item.items()}


def counted_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Mapping[str, Tensor]]
) -> list[float]:
    """Train on tiles "x", of which "num" are a sample's own, with classes "y"; return losses."""
    losses = []
    for batch in batches:
        loss = F.cross_entropy(model(batch["x"], batch["num"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _class_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _match_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    scores = model(**batch).logits_per_text
    return F.cross_entropy(scores, torch.arange(len(scores)))


def _images(size: int = 16, **others: Tensor) -> Samples:
    return Samples(pixel_values=torch.randn(NUM_SAMPLES, 3, size, size), **others)


def _words(num: int) -> Tensor:
    return torch.randint(3, _WORDS, (NUM_SAMPLES, num))


def _labelled_images() -> Samples:
    images = torch.randn(NUM_SAMPLES, 3, 32, 32)
    return Samples(x=images, y=torch.arange(NUM_SAMPLES) % _CLASSES)


class Headed(nn.Module):
    """A head on a backbone."""

    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.backbone(x))
        return answer


class DenseHead(nn.Module):
    """A head on the hidden states behind three blocks of a ViT."""

    def __init__(self, vit: nn.Module, width: int) -> None:
        super().__init__()
        self.vit, self.head = vit, nn.Linear(3 * width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        vit: Any = self.vit
        hidden, levels = vit.embeddings(x), []
        for block in vit.layers:
            hidden = block(hidden)
            levels.append(hidden)
        answer: Tensor = self.head(torch.cat(levels[1::2], dim=-1).mean(1))
        return answer


class Blocks(nn.Module):
    """A row of blocks on patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6))


def _dense() -> nn.Module:
    model = DenseHead(Blocks(), 16)
    model.vit.requires_grad_(False)  # What lies below a tap must not train.
    return model


def _resnet(name: str) -> nn.Module:
    import timm

    backbone = timm.create_model(name, num_classes=0)
    return Headed(backbone, backbone.num_features)


_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_TEXT = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": _WORDS, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    texts, images = _TEXT | {"projection_dim": 8}, _VISION | {"projection_dim": 8}
    return CLIPModel(CLIPConfig(text_config=texts, vision_config=images, projection_dim=8))


def _siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    return SiglipModel(SiglipConfig(text_config=_TEXT, vision_config=_VISION))


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    return Llava(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**_VISION),
            text_config=LlamaConfig(**_TEXT | {"num_key_value_heads": 2}),
            image_token_index=5,
            vision_feature_layer=-1,
        )
    )


def _llava_data() -> Samples:
    ids = _words(10)
    ids[ids == 5] = 6
    ids[:, 1:5] = 5  # Four patches.
    ones = torch.ones_like(ids)
    return _images(input_ids=ids, attention_mask=ones, labels=ids.masked_fill(ids == 5, -100))


def _paligemma() -> nn.Module:
    from transformers import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
    from transformers import PaliGemmaForConditionalGeneration as PaliGemma

    texts = GemmaConfig(**_TEXT, num_key_value_heads=2, head_dim=8)
    images = SiglipVisionConfig(**_VISION, projection_dim=16)
    return PaliGemma(
        PaliGemmaConfig(
            vision_config=images, text_config=texts, image_token_id=5, projection_dim=16
        )
    )


_IMAGE, _NUM_TILES = 5, 3


def _smolvlm() -> nn.Module:
    from transformers import LlamaConfig, SmolVLMConfig, SmolVLMVisionConfig
    from transformers import SmolVLMForConditionalGeneration as SmolVLM

    return SmolVLM(
        SmolVLMConfig(
            vision_config=SmolVLMVisionConfig(**_VISION),
            text_config=LlamaConfig(**_TEXT | {"num_key_value_heads": 2}),
            image_token_id=_IMAGE,
            scale_factor=2,
            pad_token_id=0,
        )
    )


def _tiles() -> Samples:
    """Give samples one to three tiles of an image; the others are zeros, which no tower sees."""
    num = torch.arange(NUM_SAMPLES) % _NUM_TILES + 1
    is_tile = torch.arange(_NUM_TILES) < num[:, None]
    ids = _words(10)
    ids[ids == _IMAGE] = 6
    ids[:, 1 : 1 + _NUM_TILES] = torch.where(is_tile, _IMAGE, 7)  # A token for each tile.
    tiles = torch.randn(NUM_SAMPLES, _NUM_TILES, 3, 16, 16) * is_tile[..., None, None, None]
    ones = torch.ones_like(ids)
    return Samples(pixel_values=tiles, input_ids=ids, attention_mask=ones, labels=ids)


def _qwen() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=_TEXT
            | {
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            },
            vision_config={
                "depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4,
                "temporal_patch_size": 1, "mlp_ratio": 2,
            },
            image_token_id=_IMAGE,
            video_token_id=7,
            vision_start_token_id=8,
            vision_end_token_id=9,
        )
    )  # fmt: skip


def _patches() -> Samples:
    ids = _words(12).clamp(10)
    ids[:, 1:7] = torch.tensor([8, *[_IMAGE] * 4, 9])
    grid = torch.tensor([1, 4, 4]).expand(NUM_SAMPLES, 1, 3)
    return Samples(
        pixel_values=torch.randn(NUM_SAMPLES, 16, 48), image_grid_thw=grid, input_ids=ids,
        attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == _IMAGE).long(), labels=ids,
    )  # fmt: skip


class Unequal(Dataset[dict[str, Tensor]]):
    """Give samples an image of 4 x 4 or of 4 x 8 patches."""

    def __init__(self, whole: Samples) -> None:
        self._whole = whole

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item, num = self._whole[index], (1, 2, 1, 1, 2, 2)[index % 6]
        ids = item["input_ids"].clone()
        ids[2 : 2 + 4 * num] = _IMAGE
        ids[2 + 4 * num :] = ids[2 + 4 * num :].clamp(10)
        grid = torch.tensor([[1, 4, 4 * num]])
        pixels = torch.randn(16 * num, 48, generator=torch.Generator().manual_seed(index))
        types = (ids == _IMAGE).long()
        known = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
        return {**item, **known, "input_ids": ids, "labels": ids}


def _llava_next() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig
    from transformers import LlavaNextForConditionalGeneration as LlavaNext

    texts = _TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlavaNext(
        LlavaNextConfig(
            vision_config=CLIPVisionConfig(**_VISION),
            text_config=LlamaConfig(**texts),
            image_token_index=_IMAGE,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[16, 32], [32, 32]],
        )
    )


class Tiled(Dataset[dict[str, Tensor]]):
    """Give samples an image of three tiles or of five, the whole one first."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        height, num_tiles, num_tokens = ((16, 3, 14), (32, 5, 24))[index % 3 == 1]
        ids = torch.randint(6, _WORDS, (28,), generator=draws)
        ids[1 : 1 + num_tokens] = _IMAGE
        return {
            "pixel_values": torch.randn(num_tiles, 3, 16, 16, generator=draws),
            "image_sizes": torch.tensor([height, 32]),
            "input_ids": ids,
            "labels": ids,
        }


def tiled(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack all but tiles, which are padded to the most that a sample of the batch has."""
    named = {name: [item[name] for item in items] for name in items[0]}
    tiles = pad_sequence(named.pop("pixel_values"), batch_first=True)
    return {"pixel_values": tiles, **{name: torch.stack(rows) for name, rows in named.items()}}


def bundled(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join patches of all samples, as Qwen2-VL's processor does."""
    return {
        name: (torch.cat if name in ("pixel_values", "image_grid_thw") else torch.stack)(
            [item[name] for item in items]
        )
        for name in items[0]
    }


class Detector(nn.Module):
    """A head on a backbone, and a loss by any number of boxes for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.Flatten(1), nn.Linear(128, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]] | None = None) -> Tensor:
        places: Tensor = self.head(self.backbone(x))
        if labels is None:
            return places
        pairs = zip(places, labels, strict=True)
        return torch.stack([(one - own["boxes"]).square().mean() for one, own in pairs]).mean()


class Boxes(Dataset[dict[str, Any]]):
    """Give images with one to three boxes."""

    def __init__(self) -> None:
        self.images = torch.randn(NUM_SAMPLES, 3, 32, 32)
        self.boxes = torch.rand(NUM_SAMPLES, 3, 4)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        boxes = self.boxes[index, : 1 + index % 3]
        return {"x": self.images[index], "labels": {"boxes": boxes}}


def listed(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack images, and list their labels, as detectors' processors do."""
    labels = [item["labels"] for item in items]
    return {"x": torch.stack([item["x"] for item in items]), "labels": labels}


_SPEECH = {
    "vocab_size": _WORDS, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 10,
    "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(WhisperConfig(**_SPEECH, dropout=0.1))


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    named = {name: value for name, value in _SPEECH.items() if "position" not in name}
    named.pop("num_mel_bins")
    return BartForConditionalGeneration(BartConfig(**named, max_position_embeddings=16))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=_WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def _wav2vec() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    return Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, use_weighted_layer_sum=True, mask_time_prob=0.0,
            num_labels=_CLASSES, classifier_proj_size=8, layerdrop=0.0,
        )
    )  # fmt: skip


def _translation(num: int = 7) -> Samples:
    ids = _words(num)
    return Samples(input_ids=ids, attention_mask=torch.ones_like(ids), labels=_words(num - 2))


def _classes() -> Tensor:
    return torch.arange(NUM_SAMPLES) % _CLASSES


CASES: dict[str, PartCase] = {
    "resnet": PartCase(
        lambda: _resnet("resnet18"), ("backbone",), _labelled_images, _class_loss,
        ("backbone.conv1",),
    ),
    "convnext": PartCase(
        lambda: _resnet("convnext_atto"), ("backbone",), _labelled_images, _class_loss,
        ("backbone.stem.0",),
    ),
    "three taps": PartCase(
        _dense, ("vit.layers.1", "vit.layers.3", "vit.layers.5"),
        _labelled_images, _class_loss,
        ("vit.embeddings.0", "vit.layers.1.0", "vit.layers.2.0", "vit.layers.5.0"),
    ),
    "clip, images": PartCase(
        _clip, ("vision_model",), lambda: _images(input_ids=_words(12)), _match_loss,
        ("vision_model.post_layernorm",),
    ),
    "clip, texts": PartCase(
        _clip, ("text_model",), lambda: _images(input_ids=_words(12)), _match_loss,
        ("text_model.final_layer_norm",),
    ),
    "siglip, both": PartCase(
        _siglip, ("vision_model", "text_model"), lambda: _images(input_ids=_words(12)),
        _match_loss, ("vision_model.post_layernorm", "text_model.final_layer_norm"),
    ),
    "llava": PartCase(
        _llava, ("model.vision_tower",), _llava_data, _own_loss,
        ("model.vision_tower.pre_layrnorm",),
    ),
    "paligemma": PartCase(
        _paligemma, ("model.vision_tower",), _llava_data, _own_loss,
        ("model.vision_tower.post_layernorm",),
    ),
    "qwen2-vl, patches": PartCase(
        _qwen, ("model.visual",), _patches, _own_loss, ("model.visual.merger",), bundled,
    ),
    "qwen2-vl, unequal images": PartCase(
        _qwen, ("model.visual",), lambda: Unequal(_patches()), _own_loss,
        ("model.visual.merger",), bundled,
    ),
    "llava-next, three tiles or five": PartCase(
        _llava_next, ("model.vision_tower",), Tiled, _own_loss,
        ("model.vision_tower.pre_layrnorm",), tiled,
    ),
    "smolvlm, one to three tiles": PartCase(
        _smolvlm, ("model.vision_model",), _tiles, _own_loss,
        ("model.vision_model.post_layernorm",),
    ),
    "one to three boxes": PartCase(
        Detector, ("backbone",), Boxes,
        lambda model, batch: model(batch["x"], labels=batch["labels"]), ("backbone.0",), listed,
    ),
    "bart, padded texts": PartCase(
        _bart, ("model.encoder",), lambda: Texts(_translation(10)), _own_loss,
        ("model.encoder.layers.0",), padded_by_8,
    ),
    "t5, padded texts": PartCase(
        _t5, ("encoder",), lambda: Texts(_translation(10)), _own_loss,
        ("encoder.final_layer_norm",), padded,
    ),
    "llava, padded texts": PartCase(
        _llava, ("model.vision_tower",), lambda: Texts(_llava_data()), _own_loss,
        ("model.vision_tower.pre_layrnorm",), padded,
    ),
    "whisper, padded labels": PartCase(
        _whisper, ("model.encoder",),
        lambda: Texts(
            Samples(input_features=torch.randn(NUM_SAMPLES, 8, 20), labels=_words(10))
        ),
        _own_loss, ("model.encoder.conv1",), padded,
    ),
    "whisper": PartCase(
        _whisper, ("model.encoder",),
        lambda: Samples(input_features=torch.randn(NUM_SAMPLES, 8, 20), labels=_words(6)),
        _own_loss, ("model.encoder.conv1",),
    ),
    "bart": PartCase(
        _bart, ("model.encoder",), _translation, _own_loss, ("model.encoder.layers.0",),
    ),
    "t5": PartCase(_t5, ("encoder",), _translation, _own_loss, ("encoder.final_layer_norm",)),
    "wav2vec2": PartCase(
        _wav2vec, ("wav2vec2",),
        lambda: Samples(input_values=torch.randn(NUM_SAMPLES, 200), labels=_classes()),
        _own_loss, ("wav2vec2.feature_projection.projection",),
    ),
}  # fmt: skip

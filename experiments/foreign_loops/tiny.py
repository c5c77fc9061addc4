"""Build what loops train: tiny random models, texts, images, and a tokenizer of words."""

from __future__ import annotations

from typing import Any

import timm
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from experiments.foreign_loops.runner import NUM_SAMPLES, counted
from freeze import find_layers

WORDS, LENGTH = 60, 8
BLOCKS = {
    "WhisperForConditionalGeneration": "model.encoder.layers",
    "T5ForConditionalGeneration": "encoder.block",
    "CLIPModel": "vision_model.encoder.layers",
}
"""Those that freeze, where a model has several lists."""
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
    "image_size": 8, "patch_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2, "encoder_layers": 4,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 8,
    "decoder_start_token_id": 1,
}  # fmt: skip
TOWERS = {"text_config": SIZES, "vision_config": {**SIZES, "hidden_size": 24}}
TEXT = torch.arange(NUM_SAMPLES * 9).mul(7).remainder(WORDS).view(-1, 9)
IMAGES = torch.rand(NUM_SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(NUM_SAMPLES) % 2
FIXED = v2.Normalize([0.5] * 3, [0.5] * 3)
RANDOM = v2.Compose([v2.RandomResizedCrop(8), v2.RandomHorizontalFlip(), FIXED])


def tiny(name: str, **more: Any) -> Any:
    """Build a model of transformers."""
    kind: Any = getattr(transformers, name)
    model = kind(kind.config_class(**{**SIZES, **more})).train()
    path = BLOCKS.get(name)
    return counted(model, model.get_submodule(path) if path else find_layers(model))


def vit() -> Any:
    sizes: Any = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_classes": 2}
    model: Any = timm.create_model("vit_tiny_patch16_224", **sizes)
    return counted(model, model.blocks)


class Classifier(nn.Module):
    """Put dropout and a linear layer on a BERT's pooled output."""

    def __init__(self) -> None:
        super().__init__()
        self.bert, self.drop, self.out = tiny("BertModel"), nn.Dropout(0.3), nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        _, pooled = self.bert(input_ids, attention_mask=attention_mask, return_dict=False)
        return self.out(self.drop(pooled))


class SmallGPT(nn.Module):
    """Return logits and loss, as small GPTs do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4))
        self.blocks = nn.ModuleList(layers)
        counted(self, self.blocks)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        hidden, mask = self.words(idx), torch.ones(LENGTH, LENGTH).triu(1).bool()
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits = self.head(hidden)
        return logits, None if targets is None else F.cross_entropy(logits.mT, targets)


class Siamese(nn.Module):
    """Compare two images by one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = vit()

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return torch.cosine_similarity(self.body(one), self.body(other))


class Encoder(nn.Module):
    """Pool a BERT's hidden states; like sentence-transformers' it takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny("BertModel")

    def forward(self, features: dict[str, Tensor]) -> Any:
        hidden, mask = self.bert(**features)[0], features["attention_mask"].unsqueeze(-1)
        return (hidden * mask).sum(1) / mask.sum(1)


def loader_of(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, **{"batch_size": 4, "shuffle": True, **options})


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", "<mask>", *(f"w{i}" for i in range(4, WORDS))]
    numbers = {word: number for number, word in enumerate(words)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special: Any = {f"{word[1:-1]}_token": word for word in words[:4]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def sentences(first: int = 0) -> list[str]:
    """Make sentences of 3 to 8 words."""
    return [
        " ".join(f"w{4 + (7 * text + 3 * word * word) % (WORDS - 4)}" for word in range(length))
        for text, length in ((text, 3 + text % 6) for text in range(first, first + NUM_SAMPLES))
    ]


def tokens(texts: list[str] | None = None, **options: Any) -> dict[str, Any]:
    made = tokenizer()(texts or sentences(), max_length=LENGTH, **options)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def rows_of(entries: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(entries, one, strict=True)) for one in zip(*entries.values(), strict=True)]


def padded(**more: Any) -> list[dict[str, Any]]:
    """Make samples of one length, with two classes or other entries."""
    return rows_of(
        {**tokens(padding="max_length", return_tensors="pt"), **(more or {"labels": CLASSES})}
    )


def ragged(**more: Any) -> Any:
    """Make a data set of the hub's, of texts of unequal lengths."""
    return Dataset.from_dict({**tokens(), "labels": CLASSES.tolist(), **more})


def pictures(transform: Any) -> Any:
    """Make a data set of the hub's that transforms images as they are read."""

    def transformed(batch: Any) -> dict[str, Any]:
        made = [transform(torch.tensor(one)) for one in batch["image"]]
        return {"pixel_values": made, "labels": batch["label"]}

    columns = {"image": [*IMAGES.numpy()], "label": CLASSES.tolist()}
    return Dataset.from_dict(columns).with_transform(transformed)

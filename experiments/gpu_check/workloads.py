"""Build the models and samples of all phases: real where they were packed, else random."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.benchmarks.measuring.timed_loop import RivalTask, own_loss
from experiments.gpu_check.findings import Setting
from experiments.gpu_check.pack import IMAGES, SENTENCES, VIT, VOCABULARY

NUM_CLASSES = 10
VOCABULARY_SIZE = 30_522
_TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 6, "num_heads": 2}
_VIT_B = {"img_size": 224, "patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
_DIFFERENT_IMAGES = 256
_WORKERS, _ROOM_FOR_WORKERS_BYTES = 4, 4 << 30
_UNKNOWN, _BEGIN, _END = 100, 101, 102
"""Tokens of BERT's vocabulary."""


class Rows(Dataset[dict[str, Tensor]]):
    """Give rows of columns as samples, and again from the first one where more are asked for.

    Args:
        columns: by name, (M, ...) each.
        num: samples; M by default.
    """

    def __init__(self, columns: Mapping[str, Tensor], num: int | None = None) -> None:
        self.columns = dict(columns)
        self._num_rows = len(next(iter(self.columns.values())))
        self._num = num or self._num_rows
        if "y" in columns:  # As torchvision's data sets hold them: so rows need no image for one.
            self.targets = columns["y"][torch.arange(self._num) % self._num_rows]

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = index % self._num_rows
        return {name: column[row] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Shuffled:
    """Order an epoch's samples, the same for the Trainer and for a plain loop."""

    num_samples: int

    def __call__(self, epoch: int) -> Tensor:
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(epoch))


def image_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of images' classes."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def build_vit(shape: Mapping[str, Any], *, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """Build a ViT of random weights; every call the same one."""
    # timm and transformers take seconds to import, and only who builds a model needs them.
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    return VisionTransformer(num_classes=NUM_CLASSES, proj_drop_rate=dropout, **shape)


def build_bert(width: int, depth: int, *, heads: int, dropout: float = 0.1) -> nn.Module:
    """Build a BERT of random weights that tells two classes apart; every call the same one."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def timed_tasks(setting: Setting, num_steps: int) -> tuple[RivalTask, ...]:
    """Return the three models whose steps are timed, with so many steps an epoch."""
    images = partial(vit_task, setting, num_steps)
    if setting.tiny:
        bert = partial(build_bert, 64, 6, heads=2)
        tokens = random_sentences(8 * num_steps, 16)
        short = RivalTask("tiny BERT, 8 x 16", 6, bert, tokens, own_loss, batch_size=8)
        return images(), short
    base = RivalTask(
        "BERT-base, 32 x 128",
        12,
        partial(build_bert, 768, 12, heads=12),
        random_sentences(32 * num_steps, 128),
        own_loss,
        batch_size=32,
    )
    minilm = RivalTask(
        "MiniLM's shape, 32 x 64",
        6,
        partial(build_bert, 384, 6, heads=12),
        sentences(setting.data, 32 * num_steps, 64),
        own_loss,
        batch_size=32,
    )
    return images(), base, minilm


def vit_task(setting: Setting, num_steps: int) -> RivalTask:
    """Return the ViT whose steps are timed, on random images."""
    shape, batch = (_TINY_VIT, 8) if setting.tiny else (_VIT_B, 64)
    columns = random_images(_DIFFERENT_IMAGES, pixels := shape["img_size"]).columns
    return RivalTask(
        f"{'tiny ViT' if setting.tiny else 'ViT-B'}, {batch} x {pixels} px",
        shape["depth"],
        partial(build_vit, shape),
        Rows(columns, batch * num_steps),
        image_loss,
        batch_size=batch,
        num_workers=reading_workers(setting),
    )


def reading_workers(setting: Setting) -> int:
    """Return how many processes read images; none where /dev/shm is too small for batches."""
    has_room = shutil.disk_usage("/dev/shm").free >= _ROOM_FOR_WORKERS_BYTES
    return _WORKERS if has_room and not setting.tiny else 0


def random_images(num: int, pixels: int, dtype: torch.dtype = torch.float32) -> Rows:
    """Return images of noise, a little brighter from class to class."""
    generator, labels = torch.Generator().manual_seed(0), torch.arange(num) % NUM_CLASSES
    noise = torch.randn(num, 3, pixels, pixels, generator=generator, dtype=dtype)
    return Rows({"x": noise + labels[:, None, None, None] / NUM_CLASSES, "y": labels})


def random_sentences(num: int, length: int, *, shortest: int | None = None) -> Rows:
    """Return sentences of random tokens: all of one length, or of all lengths from the shortest,
    padded."""
    shortest = shortest or length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, VOCABULARY_SIZE, (num, length), generator=generator)
    lengths = shortest + torch.arange(num) % (length - shortest + 1)
    return _text_rows(ids, lengths, torch.arange(num) % 2)


def random_texts(num: int, length: int, num_words: int) -> Rows:
    """Return texts of random tokens, whose labels are their tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, num_words, (num, length), generator=generator)
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


def sentences(data: str | None, num: int, length: int) -> Rows:
    """Return SST-2's sentences, cut or padded to a length; random ones where none were packed.

    A word that the vocabulary lacks is unknown as a whole: lengths are about as a tokenizer's.
    """
    if data is None:
        return random_sentences(num, length)
    words = Path(data, VOCABULARY).read_text(encoding="utf-8").splitlines()
    numbers = {word: number for number, word in enumerate(words)}
    lines = Path(data, SENTENCES).read_text(encoding="utf-8").splitlines()[1:]
    texts, labels = zip(*(line.rsplit("\t", 1) for line in lines), strict=True)
    rows = [
        [_BEGIN, *(numbers.get(word, _UNKNOWN) for word in text.split()[: length - 2]), _END]
        for text in texts
    ]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return Rows(_text_rows(ids, lengths, torch.tensor([*map(int, labels)])).columns, num)


def _text_rows(ids: Tensor, lengths: Tensor, labels: Tensor) -> Rows:
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return Rows({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})


def fine_tuned_vit(setting: Setting) -> RivalTask:
    """Return the pretrained ViT and the images that it is fine-tuned on."""
    shape: Mapping[str, Any] = _TINY_VIT if setting.tiny else {"img_size": 224, "depth": 12}
    images = read_images(setting, "train", shape["img_size"])
    build = partial(build_vit, shape) if setting.tiny else partial(_build_pretrained, setting.data)
    batch = 16 if setting.tiny else 64
    name = "tiny ViT" if setting.tiny else "ViT-S/14"
    return RivalTask(name, shape["depth"], build, images, image_loss, batch_size=batch)


def read_images(setting: Setting, split: str, pixels: int) -> Rows:
    """Return the images of a split, resized and normalised in memory; or random ones."""
    most = {"train": 96, "test": 48} if setting.tiny else {"train": 2000, "test": 500}
    if setting.data is None:
        return random_images(most[split], pixels)
    with np.load(Path(setting.data, IMAGES)) as file:
        images, labels = map(torch.tensor, (file[f"{split}_images"], file[f"{split}_labels"]))
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    # As timm normalises for DINOv2: ImageNet's mean and deviation.
    mean, deviation = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    normal = ((images[chosen[: most[split]]] / 255 - mean) / deviation).permute(0, 3, 1, 2)
    resized = nn.functional.interpolate(normal, size=pixels, mode="bicubic")
    return Rows({"x": resized, "y": labels[chosen[: most[split]]].long()})


def _build_pretrained(data: str | None) -> nn.Module:
    import timm

    from experiments.tasks.images import load_weights  # It imports torchvision.

    torch.manual_seed(0)
    name = "vit_small_patch14_dinov2"
    model: nn.Module = timm.create_model(name, img_size=224, num_classes=NUM_CLASSES)
    if data is not None:
        load_weights(model, Path(data, VIT))
    return model

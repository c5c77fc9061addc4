"""Build the models and samples of all phases: real where they were packed, else random."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.gpu_check.findings import Setting
from experiments.gpu_check.pack import IMAGES, SENTENCES, VIT, VOCABULARY
from experiments.random_models import vit

NUM_CLASSES = 10
VOCABULARY_SIZE = 30_522
TINY_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 6, "num_heads": 2}
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


EPS = 1e-4
"""Adam's, so large that it does not make a step of rounding where the true gradient is 0."""


@dataclass(frozen=True)
class LoopCase:
    """Describe what loops train.

    Args:
        build: makes the model; every call the same one.
        blocks: the name of its list of blocks.
        rows: a data set.
        loss_of: the loss of a batch.
        autocast_to: the dtype that is computed in; None computes as the weights are.
        eps: Adam's.
        collate: makes a batch of samples; None stacks them.
    """

    name: str
    build: Callable[[], nn.Module]
    blocks: str
    rows: Any
    loss_of: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    num_frozen: int
    autocast_to: torch.dtype | None = torch.bfloat16
    num_workers: int = 0
    learning_rate: float = 1e-4
    eps: float = 1e-8
    collate: Callable[[list[Any]], Any] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that transformers' model returns."""
    loss: Tensor = model(**batch).loss
    return loss


def image_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of images' classes."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


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


def fine_tuned_vit(setting: Setting) -> LoopCase:
    """Return the pretrained ViT and the images that it is fine-tuned on."""
    shape: Mapping[str, Any] = TINY_VIT if setting.tiny else {"img_size": 224, "depth": 12}
    images = read_images(setting, "train", shape["img_size"])
    pretrained = partial(_pretrained, setting.data)
    build = partial(vit, **shape) if setting.tiny else pretrained
    name, batch = ("tiny ViT", 16) if setting.tiny else ("ViT-S/14", 64)
    frozen = 2 * shape["depth"] // 3
    return LoopCase(name, build, "blocks", images, image_loss, batch, frozen, learning_rate=5e-5)


def read_images(setting: Setting, split: str, pixels: int) -> Rows:
    """Return the images of a split, resized and normalised in memory; or random ones."""
    most = {"train": 96, "test": 48} if setting.tiny else {"train": 2000, "test": 500}
    return some_images(setting.data, split, most[split], pixels)


def some_images(data: str | None, split: str, num: int, pixels: int) -> Rows:
    """Return images of CIFAR-10, resized and normalised; random ones where none were packed."""
    if data is None:
        return random_images(num, pixels)
    with np.load(Path(data, IMAGES)) as file:
        images, labels = map(torch.tensor, (file[f"{split}_images"], file[f"{split}_labels"]))
    chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    # As timm normalises for DINOv2: ImageNet's mean and deviation.
    mean, deviation = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    normal = ((images[chosen[:num]] / 255 - mean) / deviation).permute(0, 3, 1, 2)
    resized = nn.functional.interpolate(normal, size=pixels, mode="bicubic")
    return Rows({"x": resized, "y": labels[chosen[:num]].long()})


def _pretrained(data: str | None) -> nn.Module:
    torch.manual_seed(0)
    return pretrained_vit(data, 224)


def pretrained_vit(data: str | None, pixels: int) -> nn.Module:
    """Build a ViT-S/14 with a new head, whose other weights were packed; else they are random."""
    import timm

    from experiments.tasks.images import load_weights  # It imports torchvision.

    name = "vit_small_patch14_dinov2"
    model: nn.Module = timm.create_model(name, img_size=pixels, num_classes=NUM_CLASSES)
    if data is not None:
        load_weights(model, Path(data, VIT))
    return model

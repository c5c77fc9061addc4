"""Make JPEGs as photographs are, and train a small ViT on what is decoded of them."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision import transforms

from experiments.benchmarks.measuring.timed_loop import RivalTask, classes_loss

NUM_CLASSES = 10
_WIDTH, _HEIGHT, _QUALITY = 500, 375, 95
_COARSE, _FINE = (6, 8), (94, 125)
"""Rows and columns of random colours, blown up to a picture: areas, and what is on them."""


def make_jpegs(num: int) -> tuple[bytes, ...]:
    """Encode smooth random pictures of 500 x 375 pixels, the same ones on every call."""
    generator = np.random.default_rng(0)
    return tuple(_encoded(generator) for _ in range(num))


def _encoded(generator: np.random.Generator) -> bytes:
    areas, details = (
        Image.fromarray(generator.integers(256, size=(*grid, 3), dtype=np.uint8)).resize(
            (_WIDTH, _HEIGHT), Image.Resampling.BICUBIC
        )
        for grid in (_COARSE, _FINE)
    )
    file = io.BytesIO()
    Image.blend(areas, details, 0.3).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


class Jpegs(Dataset[tuple[Tensor, int]]):
    """Decode pictures to (3, P, P) float32, each with a class.

    Args:
        files: JPEGs.
        num_pixels: P.
        augment: crop and flip at random, as is done for training; else the centre is cut out.
    """

    def __init__(self, files: tuple[bytes, ...], *, num_pixels: int, augment: bool) -> None:
        self._files, self.num_pixels = files, num_pixels
        cut = (
            [transforms.RandomResizedCrop(num_pixels), transforms.RandomHorizontalFlip()]
            if augment
            else [transforms.Resize(num_pixels), transforms.CenterCrop(num_pixels)]
        )
        usual = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        self._transform = transforms.Compose([*cut, transforms.ToTensor(), usual])

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self._files[index])) as image:
            return self._transform(image.convert("RGB")), index % NUM_CLASSES


def build_vit(*, num_pixels: int, width: int, depth: int) -> nn.Module:
    """Build a ViT of patches of 32 pixels and heads of 32 features; every call the same one."""
    # timm takes seconds to import, and only those who build the model need it.
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(
        img_size=num_pixels,
        patch_size=32,
        num_classes=NUM_CLASSES,
        embed_dim=width,
        depth=depth,
        num_heads=width // 32,
        global_pool="avg",
        class_token=False,
    )


def jpeg_task(
    dataset: Jpegs, *, width: int, depth: int, batch_size: int, num_workers: int
) -> RivalTask:
    """Return the ViT on pictures.

    Args:
        dataset: of pictures.
        width, depth: of the ViT.
        batch_size, num_workers: of both sides.
    """
    return RivalTask(
        "ViT on JPEGs",
        depth,
        partial(build_vit, num_pixels=dataset.num_pixels, width=width, depth=depth),
        dataset,
        classes_loss,
        batch_size=batch_size,
        num_workers=num_workers,
    )

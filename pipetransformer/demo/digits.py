"""Build the demo's ViT, and load scikit-learn's scans of digits, which come with its package."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_BLOCKS = 8
BATCH_SIZE = 32


def build_model(
    num_classes: int, seed: int, *, width: int = 96, num_blocks: int = NUM_BLOCKS
) -> nn.Module:
    """Build the ViT: 32 x 32 pixels, patch 8, mean pooling."""
    # timm takes seconds to import, and only those who build the model need it.
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=32,
        patch_size=8,
        in_chans=1,
        num_classes=num_classes,
        embed_dim=width,
        depth=num_blocks,
        num_heads=3,
        global_pool="avg",
        class_token=False,
    )


def load_digits_split(classes: range = range(10)) -> tuple[TensorDataset, TensorDataset]:
    """Load scikit-learn's scans as (N, 1, 32, 32) float32 images and int64 labels.

    The split is stratified and fixed. With all ten classes 1,184 train, whole batches, and 600
    test.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=600, stratify=labels, random_state=0
    )
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    pixels = nn.functional.interpolate(pixels, size=32, mode="bilinear", align_corners=False)
    targets = torch.tensor(labels, dtype=torch.int64)

    def subset(index: np.ndarray) -> TensorDataset:
        chosen = torch.tensor([i for i in sorted(index.tolist()) if labels[i] in classes])
        return TensorDataset(pixels[chosen], targets[chosen])

    train, test = subset(train), subset(test)
    whole = len(train) - len(train) % BATCH_SIZE
    return TensorDataset(*train[:whole]), test

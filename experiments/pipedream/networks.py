"""Build what is compared: networks of equal tasks and different shapes, on small images."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

SIDE, CLASSES = 32, 10
NETWORKS = ("vgg16", "transformer")


def vgg16(width: int) -> nn.Sequential:
    """Build VGG-16 for 32 x 32 pixels; `width` channels instead of 64 in the first block.

    Source: Simonyan and Zisserman 2015, configuration D.
    """
    layers: list[nn.Module] = []
    channels = 1
    for factor, repeats in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
            channels = factor * width
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise((8 * width, 64 * width, 64 * width)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64 * width, CLASSES))


class _Patches(nn.Module):
    """Cut images into tokens, with a place of their own."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((SIDE // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return tokens + self.places


class _Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)


def transformer(width: int, num_blocks: int, patch: int = 4) -> nn.Sequential:
    """Build a Transformer over `patch` x `patch` pixels each, without dropout."""
    blocks = [
        nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(num_blocks)
    ]
    return nn.Sequential(
        _Patches(width, patch), *blocks, nn.LayerNorm(width), _Mean(), nn.Linear(width, CLASSES)
    )


def build(name: str, *, seed: int) -> nn.Sequential:
    """Build a narrow network, alike for equal seeds.

    Convolutions and linear layers of VGG-16 start as He et al. (2015) have it: without
    normalization a deep network trains from no smaller weights.
    """
    torch.manual_seed(seed)
    if name == "transformer":
        return transformer(32, 2, patch=8)
    network = vgg16(4)
    for layer in network:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(output, target)

"""Build what is compared: networks of equal tasks and different shapes, on small images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

SIDE, CLASSES = 32, 10


def vgg16(width: int = 16) -> nn.Sequential:
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


def alexnet(width: int = 16) -> nn.Sequential:
    """Build a network with AlexNet's proportions for 32 x 32 pixels: wide layers at the end.

    Source: Krizhevsky et al. 2012; kernels and strides are those of small images.
    """
    layers: list[nn.Module] = []
    channels = 1
    for factor, pools in ((2, True), (6, True), (12, False), (8, False), (8, True)):
        layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * pools
        channels = factor * width
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise((16 * channels, 64 * width, 64 * width)):
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


def transformer(width: int = 64, num_blocks: int = 4, patch: int = 4) -> nn.Sequential:
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


def build(name: str, *, seed: int, small: bool = False) -> nn.Sequential:
    """Build a network, alike for equal seeds; `small` is to try a command with.

    Convolutions and linear layers of VGG-16 and AlexNet start as He et al. (2015) have it: without
    normalization a deep network trains from no smaller weights.
    """
    torch.manual_seed(seed)
    network = NETWORKS[name](*((4,) if name != "transformer" else (32, 2, 8)) * small)
    if name != "transformer":
        for layer in network:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    return network


NETWORKS: dict[str, Callable[..., nn.Sequential]] = {
    "vgg16": vgg16,
    "alexnet": alexnet,
    "transformer": transformer,
}

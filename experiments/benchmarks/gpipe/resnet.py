"""Build ResNet-101 as a flat sequence: a residual path is a skip, not a nested module.

One bottleneck block is 11 layers, drawn with the skip that a stage boundary may cut:

    stash -> conv1 -> bn1 -> relu1 -> conv2 -> bn2 -> relu2 -> conv3 -> bn3 -> add -> relu3
      |                                                                         ^
      +-----------------------------------skip----------------------------------+

33 blocks, 4 layers before them (conv1, bn1, relu, maxpool) and 3 after them (avgpool, flatten, fc)
make 370 layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Any

from torch import Tensor, nn

from autopipe.skip import Namespace, pop, skippable, stash

BLOCKS = (3, 4, 23, 3)
EXPANSION = 4


class StashInput(nn.Module):
    """Keep the block's input for the addition at its end."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return the (B, C, H, W) input unchanged."""
        yield stash("residual", input)
        return input


class AddInput(nn.Module):
    """Add the block's input, projected where its shape differs from the output's.

    Args:
        downsample: the projection; None adds the input as it is.
    """

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.downsample = downsample

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return the (B, C, H, W) sum."""
        residual = yield pop("residual")
        return input + (residual if self.downsample is None else self.downsample(residual))


Stash = skippable(stash=["residual"])(StashInput)
Add = skippable(pop=["residual"])(AddInput)


def convolution(in_channels: int, out_channels: int, *, size: int, stride: int = 1) -> nn.Conv2d:
    """Build a convolution padded to keep the resolution at stride 1; batch norm has the bias."""
    return nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)


def bottleneck(in_channels: int, channels: int, *, stride: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the 11 named layers of one block; the stride is at the 3x3 convolution."""
    namespace, out_channels = Namespace(), EXPANSION * channels
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            convolution(in_channels, out_channels, size=1, stride=stride),
            nn.BatchNorm2d(out_channels),
        )
    yield "stash", Stash().isolate(namespace)
    yield "conv1", convolution(in_channels, channels, size=1)
    yield "bn1", nn.BatchNorm2d(channels)
    yield "relu1", nn.ReLU()
    yield "conv2", convolution(channels, channels, size=3, stride=stride)
    yield "bn2", nn.BatchNorm2d(channels)
    yield "relu2", nn.ReLU()
    yield "conv3", convolution(channels, out_channels, size=1)
    yield "bn3", nn.BatchNorm2d(out_channels)
    yield "add", Add(downsample).isolate(namespace)
    yield "relu3", nn.ReLU()


def resnet(
    blocks: tuple[int, ...] = BLOCKS, *, num_channels: int = 64, num_classes: int = 1000
) -> nn.Sequential:
    """Build a bottleneck ResNet; the defaults are ResNet-101 with 370 layers.

    Args:
        blocks: number of bottleneck blocks of each stage; a stage halves the resolution of the one
            before it and doubles its channels.
        num_channels: channels after the first convolution.
    Returns:
        a model from (B, 3, H, W) to (B, num_classes). Its parameters come in torchvision's order.
    Source: He et al. 2016, Deep Residual Learning for Image Recognition, table 1. As in
        torchvision's, the stride of a block is at its 3x3 convolution, not at its first 1x1.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, num_channels, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(num_channels),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    in_channels = num_channels
    for stage, num_blocks in enumerate(blocks):
        channels = num_channels * 2**stage
        for block in range(num_blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            for name, layer in bottleneck(in_channels, channels, stride=stride):
                layers[f"layer{stage + 1}_{block}_{name}"] = layer
            in_channels = EXPANSION * channels
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(in_channels, num_classes)
    return nn.Sequential(layers)

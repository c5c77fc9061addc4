"""Build a symmetric U-Net as a flat sequence that a pipeline can split at any layer.

Five levels down, a bottleneck, five levels up; C channels after the first convolution. A number is
the channels, in multiples of C, that leave a level, b a level's blocks, = its long skip:

    1 b =========================== b 1/2 -> convolution, 1 channel
      2 b ======================= b 1
        4 b =================== b 2
          8 b =============== b 4
           16 b =========== b 8
                32 b    b 16        the bottleneck: its last block halves the channels

Each block is convolution, batch norm, ReLU and dropout. Each level halves the resolution going
down. Going up, a level concatenates 16 channels from below with the 16 of its skip, and its first
block reduces the 32 to 8: the mirror image of going down, where a first block makes 16 of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.skip import Namespace, pop, skippable, stash

NUM_LEVELS = 5


class StashLatent(nn.Module):
    """Keep the latent for the level's other end."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return the (B, C, H, W) input unchanged."""
        yield stash("skip", input)
        return input


class JoinSkip(nn.Module):
    """Concatenate the level's skip."""

    def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
        """Return (B, C + skip's C, H, W)."""
        skip = yield pop("skip")
        return torch.cat((input, skip), dim=1)


Stash = skippable(stash=["skip"])(StashLatent)
Join = skippable(pop=["skip"])(JoinSkip)


def blocks(channels: list[int], dropout: float) -> Iterator[nn.Module]:
    """Yield one block between each two numbers of channels; batch norm has the bias."""
    for in_channels, out_channels in zip(channels, channels[1:], strict=False):
        yield nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        yield nn.BatchNorm2d(out_channels)
        yield nn.ReLU()
        yield nn.Dropout2d(dropout)


def layers_of(
    num_blocks: int,
    num_channels: int,
    dropout: float,
    *,
    stash_at: Callable[[int], nn.Module],
    join_at: Callable[[int], nn.Module],
) -> Iterator[nn.Module]:
    """Yield the layers; the two functions make those at which a level's skip begins and ends."""
    channels = 3
    for level in range(NUM_LEVELS):
        width = num_channels * 2**level
        yield from blocks([channels] + [width] * num_blocks, dropout)
        yield stash_at(level)
        yield nn.MaxPool2d(2)
        channels = width
    yield from blocks([channels] + [2 * channels] * (num_blocks - 1) + [channels], dropout)
    for level in reversed(range(NUM_LEVELS)):
        skip = num_channels * 2**level
        yield nn.Upsample(scale_factor=2)
        yield join_at(level)
        yield from blocks([channels + skip] + [skip // 2] * num_blocks, dropout)
        channels = skip // 2
    yield nn.Conv2d(channels, 1, 1)


def unet(num_blocks: int, num_channels: int, *, dropout: float = 0.1) -> nn.Sequential:
    """Build U-Net (B, C): B = num_blocks blocks a level, C = num_channels at the top.

    Args:
        num_blocks: at least 2, as the bottleneck first doubles and last halves the channels.
        num_channels: even; channels after the first convolution.
        dropout: probability to drop a whole channel at the end of a block.
    Returns:
        44 * B + 21 layers from (batch, 3, H, W) to (batch, 1, H, W); H and W multiples of 32.
        The long skips are declared: a pipeline sends each from its stage to its stage.
    Raises:
        ValueError: an argument out of its range.
    Source: torchgpipe, section 4.2.2, after Ronneberger et al. 2015. The manual gives the counts
        (232.7 M parameters in 241 layers for (5, 64)), from which the details here follow: a
        bottleneck of its own, no biases before batch norm, up-sampling without parameters, and
        four layers a block (the fourth, dropout, is our reading).
    """
    if num_blocks < 2:
        raise ValueError(f"num_blocks is {num_blocks}; the bottleneck needs at least 2")
    if num_channels < 2 or num_channels % 2:
        raise ValueError(f"num_channels is {num_channels}; give an even number of at least 2")
    namespaces = [Namespace() for _ in range(NUM_LEVELS)]
    layers = layers_of(
        num_blocks,
        num_channels,
        dropout,
        stash_at=lambda level: Stash().isolate(namespaces[level]),
        join_at=lambda level: Join().isolate(namespaces[level]),
    )
    return nn.Sequential(*layers)

"""Repeat the published speed table of ResNet-101.

The scale leaves its 370 layers as they are. The published batches are not in the manual; ours are
128 images a partition in micro-batches of 16. Run it as `python -m
experiments.benchmarks.gpipe.resnet101_speed`; `--help` lists what can be chosen.
"""

from __future__ import annotations

import torch
from torch import nn

from experiments.benchmarks.gpipe.resnet import resnet
from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    parse_options,
    run_speed,
    scaled,
)

SIZE = (64,)


def build(num_channels: int) -> nn.Sequential:
    """Build ResNet-101 with so many channels after the first convolution."""
    return resnet(num_channels=num_channels)


def shrink(size: tuple[int, ...], scale: float) -> tuple[int, ...]:
    """Scale the channels alone."""
    return (scaled(size[0], scale, minimum=4),)


def published(throughput: str, speed_up: str, huang: str) -> dict[str, str]:
    """Return throughput and speed-up of torchgpipe, and the speed-up of Huang et al."""
    return {"torchgpipe /s": throughput, "torchgpipe": speed_up, "Huang et al.": huang}


RESNET101 = ModelFamily(build, shrink, image_side=224, segments=False)

# Source: torchgpipe's manual 2.4.3, which quotes Huang et al. 2018, figure 3b.
EXPERIMENTS = (
    Experiment("baseline", SIZE, None, 128, published=published("95.862", "1x", "1x")),
    Experiment("pipeline-1", SIZE, 1, 128, 8, published=published("81.796", "0.853x", "0.80x")),
    Experiment("pipeline-2", SIZE, 2, 256, 16, published=published("135.539", "1.414x", "1.42x")),
    Experiment("pipeline-4", SIZE, 4, 512, 32, published=published("265.958", "2.774x", "2.18x")),
    Experiment("pipeline-8", SIZE, 8, 1024, 64, published=published("411.662", "4.294x", "2.89x")),
)


def main() -> None:
    """Print the table and, last, one JSON line."""
    torch.set_num_threads(1)
    run_speed("resnet101_speed", RESNET101, EXPERIMENTS, parse_options(__doc__, scale=0.25))


if __name__ == "__main__":
    main()

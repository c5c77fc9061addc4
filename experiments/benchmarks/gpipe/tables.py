"""List the published experiments of torchgpipe, line by line, at their published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from experiments.benchmarks.gpipe.amoebanet import amoebanet_d
from experiments.benchmarks.gpipe.resnet import resnet
from experiments.benchmarks.gpipe.runs import Experiment, ModelFamily, scaled
from experiments.benchmarks.gpipe.unet import unet

Size = tuple[int, ...]
_SPEED = ("torchgpipe /s", "torchgpipe", "Huang et al.")
_MEMORY = ("torchgpipe model", "torchgpipe activations", "Huang et al. activations")


def smaller_unet(size: Size, scale: float) -> Size:
    """Scale (B, C); the bottleneck needs two blocks."""
    return scaled(size[0], scale, minimum=2), scaled(size[1], scale, multiple=2, minimum=2)


def resnet101(num_channels: int) -> nn.Sequential:
    """Build ResNet-101 with so many channels after the first convolution."""
    return resnet(num_channels=num_channels)


def smaller_resnet(size: Size, scale: float) -> Size:
    """Scale the channels alone."""
    return (scaled(size[0], scale, minimum=4),)


def smaller_amoebanet(size: Size, scale: float) -> Size:
    """Scale (L, D); the normal cells come in thirds, and D must be a multiple of 8."""
    cells = scaled(size[0], scale, multiple=3, minimum=3)
    return cells, scaled(size[1], scale, multiple=8, minimum=8)


def line(num: int | None, size: Size, batch: int, count: int, **published: str) -> Experiment:
    """Return a table's line: partitions (None is the plain model), batch and micro-batches."""
    name = "baseline" if num is None else f"pipeline-{num}"
    return Experiment(name, size, num, batch, count, published=published)


def n_and_m(one: Experiment) -> Experiment:
    """Return a line of AmoebaNet-D's speeds, with its own name and checkpointing."""
    mode = "always" if one.num_micro_batches == 1 else "except_last"
    name = f"n={one.num_partitions}, m={one.num_micro_batches}"
    return replace(one, name=name, checkpoint=mode)


UNET = ModelFamily(unet, smaller_unet, image_side=192, segments=True)
RESNET101 = ModelFamily(resnet101, smaller_resnet, image_side=224, segments=False)
AMOEBANET_D = ModelFamily(amoebanet_d, smaller_amoebanet, image_side=224, segments=False)

# Sources: torchgpipe's manual 2.4.3 (rates) and its paper, table 4 (U-Net's batches) and section
# 4.2.1 (checkpointing); the manual quotes Huang et al. 2018, figure 3b.
UNET_SPEED = tuple(
    line(num, (5, 64), batch, count, **dict(zip(_SPEED, published, strict=False)))
    for num, batch, count, *published in (
        (None, 40, 1, "28.500", "1x"),
        (1, 80, 2, "24.456", "0.858x"),
        (2, 512, 32, "35.502", "1.246x"),
        (4, 512, 16, "67.042", "2.352x"),
        (8, 640, 40, "88.497", "3.105x"),
    )
)
RESNET101_SPEED = tuple(
    line(num, (64,), batch, count, **dict(zip(_SPEED, published, strict=True)))
    for num, batch, count, *published in (
        (None, 128, 1, "95.862", "1x", "1x"),
        (1, 128, 8, "81.796", "0.853x", "0.80x"),
        (2, 256, 16, "135.539", "1.414x", "1.42x"),
        (4, 512, 32, "265.958", "2.774x", "2.18x"),
        (8, 1024, 64, "411.662", "4.294x", "2.89x"),
    )
)
AMOEBANETD_SPEED = tuple(
    n_and_m(line(n, (18, 256), 128, m, **dict(zip(_SPEED, published, strict=True))))
    for n, m, *published in (
        (2, 1, "26.733", "1x", "1x"),
        (2, 4, "41.133", "1.539x", "1.07x"),
        (2, 32, "47.386", "1.773x", "1.21x"),
        (4, 1, "26.827", "1.004x", "1.13x"),
        (4, 4, "44.543", "1.666x", "1.26x"),
        (4, 32, "72.412", "2.709x", "1.84x"),
        (8, 1, "24.918", "0.932x", "1.38x"),
        (8, 4, "70.065", "2.621x", "1.72x"),
        (8, 32, "132.413", "4.953x", "3.48x"),
    )
)
# Sources: torchgpipe's manual 2.4.2, which quotes Huang et al. 2019, table 1; U-Net's batch: its
# paper, section 4.2.2.
UNET_MEMORY = tuple(
    line(num, size, 32, 1 if num is None else 32, torchgpipe=published)
    for num, size, published in (
        (None, (6, 72), "20.3 GiB"),
        (1, (11, 128), "20.5 GiB"),
        (2, (24, 128), "43.4 GiB"),
        (4, (24, 160), "79.1 GiB"),
        (8, (48, 160), "154.1 GiB"),
    )
)
AMOEBANETD_MEMORY = tuple(
    line(num, size, 128, 1 if num is None else 32, **dict(zip(_MEMORY, published, strict=True)))
    for num, size, *published in (
        (None, (18, 208), "0.91 GiB", "-", "6.26 GB"),
        (1, (18, 416), "3.57 GiB", "0.91 GiB", "3.46 GB"),
        (2, (18, 544), "6.07 GiB", "3.39 GiB", "8.11 GB"),
        (4, (36, 544), "11.80 GiB", "6.91 GiB", "15.21 GB"),
        (8, (72, 512), "20.62 GiB", "10.83 GiB", "26.24 GB"),
    )
)
TABLES: dict[str, tuple[ModelFamily, tuple[Experiment, ...], dict[str, Any]]] = {
    "unet_speed": (UNET, UNET_SPEED, {}),
    "resnet101_speed": (RESNET101, RESNET101_SPEED, {}),
    "amoebanetd_speed": (AMOEBANET_D, AMOEBANETD_SPEED, {}),
    "unet_memory": (UNET, UNET_MEMORY, {"momentum": 0.0}),
    "amoebanetd_memory": (AMOEBANET_D, AMOEBANETD_MEMORY, {"momentum": 0.9}),
}

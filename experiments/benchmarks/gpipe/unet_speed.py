"""Repeat the published speed table of U-Net (5, 64): the price and the gain of pipelining skips.

Batches and numbers of micro-batches are the published ones. Run it as `python -m
experiments.benchmarks.gpipe.unet_speed`; `--help` lists what can be chosen.
"""

from __future__ import annotations

import torch

from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    parse_options,
    run_speed,
    scaled,
)
from experiments.benchmarks.gpipe.unet import unet

SIZE = (5, 64)


def shrink(size: tuple[int, ...], scale: float) -> tuple[int, ...]:
    """Scale (B, C); the bottleneck needs two blocks."""
    blocks, channels = size
    return scaled(blocks, scale, minimum=2), scaled(channels, scale, multiple=2, minimum=2)


UNET = ModelFamily(unet, shrink, image_side=192, segments=True)


def published(throughput: str, speed_up: str) -> dict[str, str]:
    """Return the columns of torchgpipe's table."""
    return {"torchgpipe /s": throughput, "torchgpipe": speed_up}


# Source: torchgpipe's manual 2.4.3 (rates) and its paper, table 4 (batches, micro-batches).
EXPERIMENTS = (
    Experiment("baseline", SIZE, None, 40, published=published("28.500", "1x")),
    Experiment("pipeline-1", SIZE, 1, 80, 2, published=published("24.456", "0.858x")),
    Experiment("pipeline-2", SIZE, 2, 512, 32, published=published("35.502", "1.246x")),
    Experiment("pipeline-4", SIZE, 4, 512, 16, published=published("67.042", "2.352x")),
    Experiment("pipeline-8", SIZE, 8, 640, 40, published=published("88.497", "3.105x")),
)


def main() -> None:
    """Print the table and, last, one JSON line."""
    torch.set_num_threads(1)
    run_speed("unet_speed", UNET, EXPERIMENTS, parse_options(__doc__, scale=0.125))


if __name__ == "__main__":
    main()

"""Repeat a table of torchgpipe's manual and papers, at a scale that fits the machine.

    python -m experiments.benchmarks.gpipe unet_speed [--scale 0.125] [--partitions 1 2]

unet_speed          U-Net (5, 64): the price and the gain of pipelining skips
resnet101_speed     ResNet-101; 128 images a partition in micro-batches of 16, as the published
                    batches are not in the manual. The scale leaves its 370 layers as they are
amoebanetd_speed    AmoebaNet-D (18, 256): n partitions times m micro-batches of a batch of 128,
                    as the published one is not printed. With m = 1 all are checkpointed
unet_memory         how large a U-Net (B, C) some devices can train, of 8 bytes a parameter: itself
                    and its gradient. Each sample is a micro-batch: only so do the published
                    figures leave room for activations
amoebanetd_memory   AmoebaNet-D (L, D), of 12 bytes a parameter, with momentum; 4 images of 128 are
                    a micro-batch
"""

from __future__ import annotations

import torch

from experiments.benchmarks.gpipe.memory import run_memory
from experiments.benchmarks.gpipe.runs import parse_options, run_speed
from experiments.benchmarks.gpipe.tables import TABLES


def main() -> None:
    """Print a table and, last, one JSON line."""
    torch.set_num_threads(1)
    options = parse_options(__doc__, list(TABLES))
    family, experiments, settings = TABLES[options.table]
    run = run_memory if settings else run_speed
    run(options.table, family, experiments, options, **settings)


if __name__ == "__main__":
    main()

"""Repeat the published memory table of U-Net (B, C): how large a model some devices can train.

The published memory is of whole models, 8 bytes a parameter (itself and its gradient, plain SGD)
and activations. The batch is the published one; each sample is a micro-batch of its own, as only
so do the published figures leave room for activations. Run it as `python -m
experiments.benchmarks.gpipe.unet_memory`; `--help` lists what can be chosen.
"""

from __future__ import annotations

import torch

from experiments.benchmarks.gpipe.memory import run_memory
from experiments.benchmarks.gpipe.runs import Experiment, parse_options
from experiments.benchmarks.gpipe.unet_speed import UNET

BATCH = 32

# Source: torchgpipe's manual 2.4.2; the batch: its paper, section 4.2.2.
EXPERIMENTS = (
    Experiment("baseline", (6, 72), None, BATCH, published={"torchgpipe": "20.3 GiB"}),
    Experiment("pipeline-1", (11, 128), 1, BATCH, BATCH, published={"torchgpipe": "20.5 GiB"}),
    Experiment("pipeline-2", (24, 128), 2, BATCH, BATCH, published={"torchgpipe": "43.4 GiB"}),
    Experiment("pipeline-4", (24, 160), 4, BATCH, BATCH, published={"torchgpipe": "79.1 GiB"}),
    Experiment("pipeline-8", (48, 160), 8, BATCH, BATCH, published={"torchgpipe": "154.1 GiB"}),
)


def main() -> None:
    """Print the table and, last, one JSON line."""
    torch.set_num_threads(1)
    options = parse_options(__doc__, scale=0.125)
    run_memory("unet_memory", UNET, EXPERIMENTS, options, momentum=0.0)


if __name__ == "__main__":
    main()

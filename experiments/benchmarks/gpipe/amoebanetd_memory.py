"""Repeat the published memory table of AmoebaNet-D (L, D).

The published model memory is 12 bytes a parameter: itself, its gradient and one value of the
optimizer's; ours is SGD's momentum. The published batch is not in the manual; ours is 128 images,
each 4 of which are a micro-batch. Run it as `python -m
experiments.benchmarks.gpipe.amoebanetd_memory`; `--help` lists what can be chosen.
"""

from __future__ import annotations

import torch

from experiments.benchmarks.gpipe.amoebanetd_speed import AMOEBANET_D
from experiments.benchmarks.gpipe.memory import run_memory
from experiments.benchmarks.gpipe.runs import Experiment, parse_options

BATCH, CHUNKS = 128, 32


def published(model: str, activations: str, huang: str) -> dict[str, str]:
    """Return the published model memory, peak activations, and peak activations of Huang et al."""
    return {
        "torchgpipe model": model,
        "torchgpipe activations": activations,
        "Huang et al. activations": huang,
    }


# Source: torchgpipe's manual 2.4.2, which quotes Huang et al. 2019, table 1.
EXPERIMENTS = (
    Experiment(
        "baseline", (18, 208), None, BATCH, published=published("0.91 GiB", "-", "6.26 GB")
    ),
    Experiment(
        "pipeline-1",
        (18, 416),
        1,
        BATCH,
        CHUNKS,
        published=published("3.57 GiB", "0.91 GiB", "3.46 GB"),
    ),
    Experiment(
        "pipeline-2",
        (18, 544),
        2,
        BATCH,
        CHUNKS,
        published=published("6.07 GiB", "3.39 GiB", "8.11 GB"),
    ),
    Experiment(
        "pipeline-4",
        (36, 544),
        4,
        BATCH,
        CHUNKS,
        published=published("11.80 GiB", "6.91 GiB", "15.21 GB"),
    ),
    Experiment(
        "pipeline-8",
        (72, 512),
        8,
        BATCH,
        CHUNKS,
        published=published("20.62 GiB", "10.83 GiB", "26.24 GB"),
    ),
)


def main() -> None:
    """Print the table and, last, one JSON line."""
    torch.set_num_threads(1)
    options = parse_options(__doc__, scale=0.125)
    run_memory("amoebanetd_memory", AMOEBANET_D, EXPERIMENTS, options, momentum=0.9)


if __name__ == "__main__":
    main()

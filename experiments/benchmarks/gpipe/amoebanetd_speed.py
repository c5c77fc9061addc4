"""Repeat the published speed table of AmoebaNet-D (18, 256): n partitions times m micro-batches.

With m = 1 every micro-batch is checkpointed, as in the published comparison. The published batch
was chosen for each line and is not printed; ours is the same for all. Run it as `python -m
experiments.benchmarks.gpipe.amoebanetd_speed`; `--help` lists what can be chosen.
"""

from __future__ import annotations

import torch

from experiments.benchmarks.gpipe.amoebanet import amoebanet_d
from experiments.benchmarks.gpipe.runs import (
    Experiment,
    ModelFamily,
    parse_options,
    run_speed,
    scaled,
)

BATCH = 128


def shrink(size: tuple[int, ...], scale: float) -> tuple[int, ...]:
    """Scale (L, D); the normal cells come in thirds, and D must be a multiple of 8."""
    cells, filters = size
    cells = scaled(cells, scale, multiple=3, minimum=3)
    return cells, scaled(filters, scale, multiple=8, minimum=8)


AMOEBANET_D = ModelFamily(amoebanet_d, shrink, image_side=224, segments=False)

# n, m: throughput and speed-up of torchgpipe, speed-up of Huang et al.
# Source: torchgpipe's manual 2.4.3, table 1; checkpointing: its paper, section 4.2.1.
PUBLISHED = {
    (2, 1): ("26.733", "1x", "1x"),
    (2, 4): ("41.133", "1.539x", "1.07x"),
    (2, 32): ("47.386", "1.773x", "1.21x"),
    (4, 1): ("26.827", "1.004x", "1.13x"),
    (4, 4): ("44.543", "1.666x", "1.26x"),
    (4, 32): ("72.412", "2.709x", "1.84x"),
    (8, 1): ("24.918", "0.932x", "1.38x"),
    (8, 4): ("70.065", "2.621x", "1.72x"),
    (8, 32): ("132.413", "4.953x", "3.48x"),
}
EXPERIMENTS = tuple(
    Experiment(
        f"n={n}, m={m}",
        (18, 256),
        n,
        BATCH,
        m,
        checkpoint="always" if m == 1 else "except_last",
        published={"torchgpipe /s": rate, "torchgpipe": speed_up, "Huang et al.": huang},
    )
    for (n, m), (rate, speed_up, huang) in PUBLISHED.items()
)


def main() -> None:
    """Print the table and, last, one JSON line."""
    torch.set_num_threads(1)
    run_speed("amoebanetd_speed", AMOEBANET_D, EXPERIMENTS, parse_options(__doc__, scale=0.125))


if __name__ == "__main__":
    main()

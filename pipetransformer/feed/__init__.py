"""Give stage 0 its samples: read, collated, through the frozen prefix and the cache.

timeline ─► coming_batches: which samples come next
samples ─► collation: one batch         workers: read ahead of the steps
sample_feed ─► stage 0
  ├─ frozen_prefix: runs the frozen layers, and stamps them
  ├─ row_format, held_targets, node_store: the cache's rows, and where they lie
  └─ coming_fetches: which fetches come next
"""

from pipetransformer.feed.collation import Batch, Collation, names_for
from pipetransformer.feed.coming_batches import ComingBatches, ComingStep
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.held_targets import HeldTargets
from pipetransformer.feed.random_numbers import own_random_numbers, seed_plainly, seed_torch
from pipetransformer.feed.rounding import tell_of_loss, tell_of_outputs
from pipetransformer.feed.sample_feed import (
    ComputedRows,
    Rows,
    SampleFeed,
    first_samples,
    samples_of,
)
from pipetransformer.feed.samples import (
    SampleError,
    Samples,
    SizedDataset,
    check_dataset,
    find_changed,
    part_of,
    read_lengths,
)
from pipetransformer.feed.timeline import Clock, Position, Timeline
from pipetransformer.feed.workers import ForeseenSamples, Request

__all__ = [
    "Batch", "Clock", "Collation", "ComingBatches", "ComingStep", "ComputedRows",
    "ForeseenSamples", "FrozenPrefix", "HeldTargets", "Position", "Request", "Rows", "SampleError",
    "SampleFeed", "Samples", "SizedDataset", "Timeline", "check_dataset", "find_changed",
    "first_samples", "names_for", "own_random_numbers", "part_of", "read_lengths", "samples_of",
    "seed_plainly", "seed_torch", "tell_of_loss", "tell_of_outputs",
]  # fmt: skip

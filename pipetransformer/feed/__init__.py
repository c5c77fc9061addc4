"""Give stage 0 its samples: read, collated, through the frozen prefix and the cache.

timeline ─► batch_forecast: which samples come next
samples ─► collation: one batch         workers: read ahead of the steps
sample_feed ─► stage 0
  ├─ frozen_prefix: runs the frozen layers, and stamps them
  ├─ fetch_forecast ─► row_block: the rows of several fetches, read at once
  └─ row_keeper: the cache's rows
       ├─ row_format, target_source: what a row holds
       ├─ node_store: where rows lie
       └─ row_origin, row_proof: whether rows of other runs are this run's
"""

from pipetransformer.feed.batch_forecast import (
    BatchForecast,
    ComingStep,
    keeps_places,
    may_lie_on_gpus,
    share_of_rows_found,
)
from pipetransformer.feed.collation import Batch, Collation, entry_of
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.random_numbers import own_random_numbers, seed_plainly, seed_torch
from pipetransformer.feed.rounding import tell_of_loss, tell_of_outputs
from pipetransformer.feed.row_format import refuse_counted_padding
from pipetransformer.feed.row_keeper import RowBudget, RowKeeper
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
    attributes_of,
    check_dataset,
    find_changed,
    numbers_in,
    part_of,
    read_lengths,
    spread,
)
from pipetransformer.feed.target_source import TargetSource
from pipetransformer.feed.timeline import Clock, Position, Timeline
from pipetransformer.feed.workers import ForeseenSamples, Request

__all__ = [
    "Batch", "BatchForecast", "Clock", "Collation", "ComingStep", "ComputedRows",
    "ForeseenSamples", "FrozenPrefix", "Position", "Request", "RowBudget", "RowKeeper", "Rows",
    "SampleError", "SampleFeed", "Samples", "SizedDataset", "TargetSource", "Timeline",
    "attributes_of", "check_dataset", "entry_of", "find_changed", "first_samples", "keeps_places",
    "may_lie_on_gpus", "numbers_in", "own_random_numbers", "part_of",
    "read_lengths", "refuse_counted_padding", "samples_of", "seed_plainly", "seed_torch",
    "share_of_rows_found", "spread", "tell_of_loss", "tell_of_outputs",
]  # fmt: skip

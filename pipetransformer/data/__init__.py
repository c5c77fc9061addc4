"""Read samples by position, and collate them.

samples ─► collation: one batch       sample_lengths
   └─► workers: ahead of the steps
"""

from pipetransformer.data.collation import Batch, CollateFunction, Collation
from pipetransformer.data.sample_lengths import read_lengths
from pipetransformer.data.samples import (
    Samples,
    SizedDataset,
    check_dataset,
    own_random_numbers,
    part_of,
    seed_plainly,
)
from pipetransformer.data.workers import ForeseenSamples, Request

__all__ = [
    "Batch", "CollateFunction", "Collation", "ForeseenSamples", "Request", "Samples",
    "SizedDataset", "check_dataset", "own_random_numbers", "part_of", "read_lengths",
    "seed_plainly",
]  # fmt: skip

"""Read samples by position, and collate them.

samples ─► collation: one batch       sample_lengths, random_numbers, held_targets
   └─► workers: ahead of the steps
"""

from autopipe.random_state import plain_random_state, random_state
from pipetransformer.data.collation import Batch, CollateFunction, Collation
from pipetransformer.data.held_targets import HeldTargets
from pipetransformer.data.random_numbers import (
    own_random_numbers,
    seed_plainly,
    seed_torch,
)
from pipetransformer.data.sample_lengths import read_lengths
from pipetransformer.data.samples import (
    SampleError,
    Samples,
    SizedDataset,
    check_dataset,
    find_changed,
    part_of,
)
from pipetransformer.data.workers import ForeseenSamples, Request

__all__ = [
    "Batch", "CollateFunction", "Collation", "ForeseenSamples", "HeldTargets", "Request",
    "SampleError", "Samples", "SizedDataset", "check_dataset", "find_changed",
    "own_random_numbers", "part_of", "plain_random_state", "random_state", "read_lengths",
    "seed_plainly", "seed_torch",
]  # fmt: skip

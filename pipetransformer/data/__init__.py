"""Read samples by position, and collate them."""

from pipetransformer.data.samples import (
    Batch,
    SizedDataset,
    check_dataset,
    has_targets,
    own_random_numbers,
    part_of,
    read_samples,
    varies_between_reads,
)

__all__ = [
    "Batch", "SizedDataset", "check_dataset", "has_targets", "own_random_numbers",
    "part_of", "read_samples", "varies_between_reads",
]  # fmt: skip

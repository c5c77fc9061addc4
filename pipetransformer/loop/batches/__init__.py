"""Know a loop's batches: which samples they hold, in what form, and what in them is random.

loaders: give indices             batch_form: the form of a batch
batch_entry: whose rows it is     pieces, bundles, joined_texts: rows, patches, texts of samples
randomness, data_watch: what changes
"""

from pipetransformer.loop.batches.batch_entry import BatchEntry, Mark, plain
from pipetransformer.loop.batches.batch_form import BatchForm, LoaderCollation, beside
from pipetransformer.loop.batches.bundles import Bundles
from pipetransformer.loop.batches.data_watch import DataWatch
from pipetransformer.loop.batches.joined_texts import (
    DERIVED,
    POSITIONS,
    TOKENS,
    JoinedTexts,
    refuse_unlike,
)
from pipetransformer.loop.batches.loaders import (
    base_of,
    begun_within,
    giving_indices,
    is_same_dataset,
    is_same_function,
)
from pipetransformer.loop.batches.pieces import Pieces, in_pieces
from pipetransformer.loop.batches.randomness import collating_kept, generators_kept, warn_of_draws

__all__ = [
    "BatchEntry", "BatchForm", "Bundles", "DERIVED", "DataWatch", "JoinedTexts", "LoaderCollation",
    "Mark", "POSITIONS", "Pieces", "TOKENS", "base_of", "begun_within", "beside",
    "collating_kept",
    "generators_kept", "giving_indices", "in_pieces", "is_same_dataset", "is_same_function",
    "plain", "refuse_unlike", "warn_of_draws",
]  # fmt: skip

"""Save a run beside training, resume it on any number of ranks, and export its weights.

run_state      gathers the parts of a run, saves and restores them
saver          copies shards and writes them in a thread
format         folders, manifests and hashes on disk
frozen_store   what no step changes, written once
resume         whether a run continues, and who holds its folder
best_model     the best evaluation, and its weights
model_folder   folders that from_pretrained loads; the command `export`
"""

from pipetransformer.checkpoint.best_model import BEST_FOLDER, BestModel, Selection
from pipetransformer.checkpoint.format import (
    Checkpoint,
    holds_checkpoint,
    open_checkpoint,
    published,
)
from pipetransformer.checkpoint.model_folder import (
    DescribedModel,
    add_export_parser,
    read_weights,
    write_model_folder,
)
from pipetransformer.checkpoint.resume import (
    CHECKPOINTS,
    LOCK_FILE,
    lock_folder,
    open_latest,
    resumes,
)
from pipetransformer.checkpoint.run_state import Part, RunState
from pipetransformer.checkpoint.saver import Saved

__all__ = [
    "BEST_FOLDER", "BestModel", "CHECKPOINTS", "Checkpoint", "DescribedModel", "LOCK_FILE",
    "Part", "RunState", "Saved", "Selection", "add_export_parser", "holds_checkpoint",
    "lock_folder", "open_checkpoint", "open_latest", "published", "read_weights",
    "resumes", "write_model_folder",
]  # fmt: skip

"""Save a run beside training, and resume it on any number of ranks.

run_state ─► saver ─► snapshot ─► format      resume ◄─ folder_lock
"""

from pipetransformer.checkpoint.folder_lock import LOCK_FILE, lock_folder
from pipetransformer.checkpoint.format import (
    Checkpoint,
    holds_checkpoint,
    open_checkpoint,
    published,
)
from pipetransformer.checkpoint.resume import CHECKPOINTS, open_latest, resumes
from pipetransformer.checkpoint.run_state import Part, RunState
from pipetransformer.checkpoint.saver import Saved

__all__ = [
    "CHECKPOINTS", "Checkpoint", "LOCK_FILE", "Part", "RunState", "Saved", "holds_checkpoint",
    "lock_folder", "open_checkpoint", "open_latest", "published", "resumes",
]  # fmt: skip

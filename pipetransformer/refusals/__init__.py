"""Refuse what cannot be trained, before anything starts.

run_checks      processes, batch, torch's modes around the Trainer
rank_checks     whether all ranks were given the same
model_checks    what a model and a loss look like, and hold
sublayer_probe  what sublayers do with two samples
"""

from pipetransformer.refusals.model_checks import (
    refuse_captured,
    refuse_model,
    warn_of_full_float32,
    warn_of_low_weights,
)
from pipetransformer.refusals.rank_checks import refuse_differing_ranks
from pipetransformer.refusals.run_checks import (
    check_selection,
    check_world,
    refuse_surroundings,
    warn_of_large_batch,
)
from pipetransformer.refusals.sublayer_probe import probe_evaluation, probe_sublayers

__all__ = [
    "check_selection", "check_world", "probe_evaluation", "probe_sublayers", "refuse_captured",
    "refuse_differing_ranks", "refuse_model", "refuse_surroundings",
    "warn_of_full_float32", "warn_of_large_batch", "warn_of_low_weights",
]  # fmt: skip

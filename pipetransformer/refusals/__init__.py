"""Refuse what cannot be trained, before anything starts.

run_checks      processes, batch, torch's modes around the Trainer
model_checks    what a model looks like
sublayer_probe  what its sublayers do with two samples
"""

from pipetransformer.refusals.model_checks import refuse_model, warn_of_low_weights
from pipetransformer.refusals.run_checks import check_selection, check_world, refuse_surroundings
from pipetransformer.refusals.sublayer_probe import probe_evaluation, probe_sublayers

__all__ = [
    "check_selection", "check_world", "probe_evaluation", "probe_sublayers", "refuse_model",
    "refuse_surroundings", "warn_of_low_weights",
]  # fmt: skip

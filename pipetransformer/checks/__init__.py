"""Refuse what cannot be trained, before anything starts.

run_checks      processes, batch, torch's modes around the Trainer
model_checks    what a model looks like
sublayer_probe  what its sublayers do with two samples
"""

from pipetransformer.checks.model_checks import refuse_model
from pipetransformer.checks.run_checks import check_world, refuse_surroundings
from pipetransformer.checks.sublayer_probe import probe_sublayers

__all__ = [
    "check_world", "probe_sublayers", "refuse_model", "refuse_surroundings",
]  # fmt: skip

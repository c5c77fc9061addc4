"""Refuse what cannot be trained, before anything starts; verify what is.

run_checks       processes, batch, torch's modes around the Trainer
rank_checks      whether all ranks were given the same (held_values)
model_checks     what a model and a loss look like, and hold
optimizer_trial  whether an optimizer is the same in parts
sublayer_probe   what sublayers do with two samples
verification     the model's own forward and a plain loop beside ours, on twins (model_copy):
                 verified_layers on rank 0, verified_pipelines on all
"""

from pipetransformer.checks.model_checks import (
    refuse_captured,
    refuse_model,
    warn_of_full_float32,
    warn_of_low_weights,
)
from pipetransformer.checks.optimizer_trial import try_optimizer
from pipetransformer.checks.rank_checks import refuse_differing_ranks
from pipetransformer.checks.run_checks import (
    check_selection,
    check_world,
    refuse_surroundings,
    warn_of_large_batch,
)
from pipetransformer.checks.sublayer_probe import probe_evaluation, probe_sublayers
from pipetransformer.checks.task_checks import describe_task, rate_of_layer
from pipetransformer.checks.verification import Verification, verify

__all__ = [
    "rate_of_layer",
    "describe_task",
    "Verification", "check_selection", "check_world", "probe_evaluation", "probe_sublayers",
    "refuse_captured", "refuse_differing_ranks", "refuse_model", "refuse_surroundings",
    "try_optimizer", "verify", "warn_of_full_float32", "warn_of_large_batch",
    "warn_of_low_weights",
]  # fmt: skip

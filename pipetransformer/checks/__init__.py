"""Refuse runs that cannot train, before anything starts, and verify a model on request.

A check raises or returns what it finds. It changes nothing.

run_checks       processes, batch, torch's modes around the Trainer
model_checks     the model's parameters, buffers and hooks; then the loss and the optimizer
optimizer_trial  whether an optimizer updates the same in parts
rank_checks      whether all ranks were given the same
sample_faults    which sample was at fault, once something has failed
sublayer_probe   how sublayers treat two samples
verification     the model's own forward beside its layers, on twins, by rank 0
verified_steps   a plain loop beside pipelines, on all ranks
"""

from pipetransformer.checks.model_checks import (
    describe_task,
    refuse_untrained,
    warn_of_full_float32,
    warn_of_low_weights,
    warn_of_tied_weights,
)
from pipetransformer.checks.optimizer_trial import try_optimizer
from pipetransformer.checks.rank_checks import attributes_of, refuse_differing_ranks
from pipetransformer.checks.run_checks import (
    check_selection,
    check_world,
    refuse_surroundings,
    warn_of_large_batch,
    warn_of_many_views,
)
from pipetransformer.checks.sample_faults import naming_bad_samples, naming_first_samples
from pipetransformer.checks.sublayer_probe import probe_evaluation, probe_sublayers
from pipetransformer.checks.twins import differ
from pipetransformer.checks.verification import Verification, verify, verify_recorded

__all__ = [
    "Verification", "attributes_of", "check_selection", "check_world", "describe_task", "differ",
    "naming_bad_samples", "naming_first_samples", "probe_evaluation", "probe_sublayers",
    "refuse_differing_ranks", "refuse_surroundings", "refuse_untrained",
    "try_optimizer", "verify", "verify_recorded", "warn_of_full_float32", "warn_of_large_batch",
    "warn_of_low_weights", "warn_of_many_views", "warn_of_tied_weights",
]  # fmt: skip

"""Refuse runs that cannot train, before anything starts, and verify a model on request.

A check raises or returns what it finds. It changes nothing.

start            the checks of a run once its processes have met, in their order
run_checks       processes, batch, torch's modes around the Trainer
model_checks     the model's parameters, buffers and hooks; then the loss and the optimizer
optimizer_trial  whether an optimizer updates the same in parts
rank_checks      whether all ranks were given the same
sample_faults    which sample was at fault, once something has failed
sublayer_probe   how sublayers treat two samples
attribute_memory what they keep from call to call
verification     the model's own forward beside its layers, on twins, by rank 0
verified_steps   a plain loop beside pipelines, on all ranks
"""

from pipetransformer.checks.model_checks import describe_task
from pipetransformer.checks.optimizer_trial import try_optimizer
from pipetransformer.checks.run_checks import check_settings, refuse_surroundings
from pipetransformer.checks.sample_faults import naming_first_samples
from pipetransformer.checks.start import Findings, RunChecks
from pipetransformer.checks.twins import differ
from pipetransformer.checks.verification import Verification

__all__ = [
    "Findings", "RunChecks", "Verification", "check_settings", "describe_task",
    "differ", "naming_first_samples", "refuse_surroundings", "try_optimizer",
]  # fmt: skip

"""Measure what policies decide from, sublayer by sublayer, without waiting for the device.

gradients ──► GradientSignals ─┐
weights ────► WeightChanges ───┼─► IntervalSignals ─► joined ─► layer_values
gradients ──► GradientSums ────┘     of one stage
activations of a fixed batch ──► gram ─► linear_cka, similarity_change, svcca
"""

from freeze.signals.gradients import GradientSignals, Measured
from freeze.signals.interval_signals import IntervalSignals, is_signal_tensor, layer_values
from freeze.signals.similarity import gram, linear_cka, similarity_change, svcca
from freeze.signals.weight_changes import WeightChanges, relative_update

__all__ = [
    "GradientSignals", "IntervalSignals", "Measured", "WeightChanges", "gram",
    "is_signal_tensor", "layer_values", "linear_cka", "relative_update", "similarity_change",
    "svcca",
]  # fmt: skip

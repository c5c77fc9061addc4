"""Decide how many bottom layers are frozen, from signals measured while training.

Only a contiguous prefix freezes: `num_frozen` = f freezes layers 0..f-1, 0 <= f <= L.

    gradients --GradientSignals--> mean squares --layer_norms--> LayerStats
                                                                     |
    FreezeDecision <--checked_decision-- FreezePolicy.decide <-- FreezeContext
"""

from freeze.policy import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    LayerStats,
    NeverFreeze,
    as_policy,
    checked_decision,
)
from freeze.rules import AlphaSchedule, FreezeSchedule, PaperRule
from freeze.signals import GradientSignals, layer_norms

__all__ = [
    "AlphaSchedule", "FreezeContext", "FreezeDecision", "FreezePolicy", "FreezeSchedule",
    "GradientSignals", "LayerStats", "NeverFreeze", "PaperRule", "as_policy",
    "checked_decision", "layer_norms",
]  # fmt: skip

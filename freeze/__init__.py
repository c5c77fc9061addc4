"""Decide how many bottom layers are frozen, from signals measured while training.

Only a contiguous prefix freezes: `num_frozen` = f freezes layers 0..f-1, 0 <= f <= L.

    gradients --GradientSignals--> mean squares --layer_norms--> LayerStats
                                                                     |
    FreezeDecision <--checked_decision-- FreezePolicy.decide <-- FreezeContext

`apply` freezes a model's bottom layers in place, in anybody's training loop; `freeze.advisor`
watches one, and says what could freeze.
"""

from freeze.in_place import apply, find_layers
from freeze.policy import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    LayerStats,
    NeverFreeze,
    as_policy,
    checked_decision,
)
from freeze.quiet_updates import QuietUpdates
from freeze.rules import AlphaSchedule, FreezeSchedule, Linear, PaperRule
from freeze.signals import GradientSignals, layer_norms
from freeze.wrappers import Guarded, Replay, Shadow

__all__ = [
    "AlphaSchedule", "FreezeContext", "FreezeDecision", "FreezePolicy", "FreezeSchedule",
    "GradientSignals", "Guarded", "LayerStats", "Linear", "NeverFreeze", "PaperRule",
    "QuietUpdates", "Replay", "Shadow", "apply", "as_policy", "checked_decision", "find_layers",
    "layer_norms",
]  # fmt: skip

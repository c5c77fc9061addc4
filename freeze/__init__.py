"""Decide how many bottom layers are frozen, from signals measured while training.

Only a contiguous prefix freezes: `num_frozen` = f freezes layers 0..f-1, 0 <= f <= L.

    signals/: gradients, weights, activations --layer_values--> LayerStats
                                                                    |
    FreezeDecision <--checked_decision-- FreezePolicy.decide <-- FreezeContext
                                          policies/

`apply` freezes a model's bottom layers in place, in any training loop.
"""

from freeze.in_place import apply, find_layers
from freeze.journal_lines import JOURNAL_FILE, note_decision, read_line, sealed_line
from freeze.policies import (
    AlphaSchedule,
    AutoFreeze,
    FreezeSchedule,
    Guarded,
    Linear,
    PaperRule,
    Plasticity,
    QuietUpdates,
    Replay,
    TimeBudget,
)
from freeze.policy import (
    MEASURED_SIGNALS,
    PROBE_SIGNALS,
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    LayerStats,
    NeverFreeze,
    PolicyError,
    PolicyFunction,
    as_policy,
    checked_decision,
    frozen_since,
)
from freeze.policy_names import POLICY_HELP, FreezeChoice, chosen_policy, named_policy

__all__ = [
    "AlphaSchedule", "AutoFreeze", "FreezeChoice", "FreezeContext", "FreezeDecision",
    "FreezePolicy", "FreezeSchedule", "Guarded", "JOURNAL_FILE", "LayerStats", "Linear",
    "MEASURED_SIGNALS", "NeverFreeze", "POLICY_HELP", "PROBE_SIGNALS", "PaperRule", "Plasticity",
    "PolicyError", "PolicyFunction", "QuietUpdates", "Replay", "TimeBudget", "apply",
    "as_policy", "checked_decision", "chosen_policy", "find_layers", "frozen_since",
    "named_policy", "note_decision", "read_line", "sealed_line",
]  # fmt: skip

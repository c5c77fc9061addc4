"""The policies that come with the project.

made beforehand:   FreezeSchedule, AlphaSchedule, Linear, Replay
from step times:    TimeBudget
from gradients:    PaperRule, AutoFreeze
from weights:      QuietUpdates
from activations:  Plasticity
around another:    Guarded
"""

from freeze.policies.arguments import metric_sign
from freeze.policies.auto_freeze import AutoFreeze
from freeze.policies.freeze_schedules import AlphaSchedule, FreezeSchedule, Linear
from freeze.policies.guarded import Guarded
from freeze.policies.paper_rule import PaperRule
from freeze.policies.plasticity import Plasticity
from freeze.policies.quiet_updates import QuietUpdates
from freeze.policies.replay import Replay
from freeze.policies.time_budget import TimeBudget

__all__ = [
    "AlphaSchedule", "AutoFreeze", "FreezeSchedule", "Guarded", "Linear",
    "PaperRule", "Plasticity", "QuietUpdates", "Replay", "TimeBudget", "metric_sign",
]  # fmt: skip

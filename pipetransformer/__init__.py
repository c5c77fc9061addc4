"""Elastic, freeze-aware pipeline training of Transformers.

All that training with `Trainer` and pipelines in one process take is here. Beside it are
`pipetransformer.hf`, transformers' Trainer. For loops of your own there are `attach`, which
freezes and caches, and `freeze`; for others' trainers `FreezeCallback` (transformers, TRL) and
`LightningFreezeCallback`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autocache import CacheStats
from autopipe.engine import is_checkpointing, is_recomputing
from autopipe.gpipe import GPipe, StashedPipeline, flatten_sequential, restore_batch_norm
from autopipe.loss import Loss
from autopipe.plan import PipelinePlan, PlanRequest
from autopipe.profile import Profile, Ring
from autopipe.trace import Recorder, Span, Summary, Trace
from freeze import (
    AlphaSchedule,
    AutoFreeze,
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    FreezeSchedule,
    Guarded,
    LayerStats,
    Linear,
    NeverFreeze,
    PaperRule,
    Plasticity,
    PolicyError,
    QuietUpdates,
    Replay,
    TimeBudget,
)
from pipetransformer import balance, skip
from pipetransformer.checks import Verification
from pipetransformer.config import (
    TrainConfig,
    cosine_with_warmup,
    named_schedule,
)
from pipetransformer.elastic import Change, Decision, PlanSituation, fastest_plan, published_plan
from pipetransformer.errors import (
    CallbackError,
    CorruptCheckpointError,
    NonFiniteError,
    PeerError,
    VerificationError,
    WorkerFailedError,
)
from pipetransformer.loop import (
    CachedLoop,
    FreezeAdvice,
    TokenAnswer,
    TokenLogProbs,
    TopAnswer,
    TopLogits,
    attach,
)
from pipetransformer.model import LayeredModel, Sublayer, adamw, named_optimizer, register_adapter
from pipetransformer.processes import launch
from pipetransformer.report import Callback, FitReport
from pipetransformer.stage import EvalPrediction, PredictionOutput, StepResult
from pipetransformer.trainer import Trainer

if TYPE_CHECKING:
    from pipetransformer.loop import FreezeCallback as FreezeCallback
    from pipetransformer.loop import LightningFreezeCallback as LightningFreezeCallback

__all__ = [
    "AlphaSchedule", "AutoFreeze", "CacheStats", "CachedLoop", "Callback", "CallbackError",
    "Change", "CorruptCheckpointError", "Decision", "EvalPrediction", "FitReport", "FreezeAdvice",
    "FreezeContext", "FreezeDecision", "FreezePolicy", "FreezeSchedule", "GPipe",
    "Guarded", "LayerStats", "LayeredModel", "Linear", "Loss", "NeverFreeze",
    "NonFiniteError", "PaperRule", "PeerError", "PipelinePlan", "PlanRequest", "PlanSituation",
    "Plasticity", "PolicyError", "PredictionOutput", "Profile", "QuietUpdates", "Recorder",
    "Replay", "Ring", "Span", "StashedPipeline", "StepResult", "Sublayer", "Summary",
    "TimeBudget", "TokenAnswer", "TokenLogProbs", "TopAnswer", "TopLogits", "Trace",
    "TrainConfig", "Trainer", "Verification", "VerificationError", "WorkerFailedError",
    "adamw", "attach", "balance", "cosine_with_warmup", "fastest_plan", "flatten_sequential",
    "is_checkpointing", "is_recomputing", "launch", "named_optimizer", "named_schedule",
    "published_plan", "register_adapter", "restore_batch_norm", "skip",
]  # fmt: skip

# Not in __all__: who imports all of it may lack a framework.
_LAZY = ("FreezeCallback", "LightningFreezeCallback")


def __getattr__(name: str) -> Any:
    """Import a callback only when asked: each needs its own framework."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("pipetransformer.loop"), name)


__version__ = "0.2.0"

"""Elastic, freeze-aware pipeline training of Transformers.

The whole public API is here; a user never needs another import.
"""

from autopipe import (
    GPipe,
    PipelinePlan,
    Profile,
    balance,
    flatten_sequential,
    is_checkpointing,
    is_recomputing,
    restore_batch_norm,
    skip,
)
from freeze import (
    ClosedForm,
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    FreezeSchedule,
    LayerStats,
    Never,
    PaperRule,
)
from pipetransformer.adapters import LayeredModel, Sublayer, register_adapter
from pipetransformer.config import TrainConfig, cosine_with_warmup, polynomial_with_warmup
from pipetransformer.launch import WorkerFailedError, launch
from pipetransformer.loss import Loss
from pipetransformer.optimizer_state import adamw
from pipetransformer.planning import PlanSituation, fastest_plan, published_plan
from pipetransformer.trainer import FitReport, Trainer
from pipetransformer.verification import Verification, VerificationError

__all__ = [
    "ClosedForm",
    "FitReport",
    "FreezeContext",
    "FreezeDecision",
    "FreezePolicy",
    "FreezeSchedule",
    "GPipe",
    "LayerStats",
    "LayeredModel",
    "Loss",
    "Never",
    "PaperRule",
    "PipelinePlan",
    "PlanSituation",
    "Profile",
    "Sublayer",
    "TrainConfig",
    "Trainer",
    "Verification",
    "VerificationError",
    "WorkerFailedError",
    "adamw",
    "balance",
    "cosine_with_warmup",
    "fastest_plan",
    "flatten_sequential",
    "is_checkpointing",
    "is_recomputing",
    "launch",
    "polynomial_with_warmup",
    "published_plan",
    "register_adapter",
    "restore_batch_norm",
    "skip",
]

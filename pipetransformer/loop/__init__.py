"""Freeze a model's bottom blocks, and cache what they compute, in a training loop of one's own.

cached_loop: a loop, epoch by epoch ──────┬─► row_service: freezes, serves
  └─► epoch_policy: asks a policy         │     ├─► loop_model: what a look at the model finds
callbacks of transformers and Lightning   │     ├─► frozen_blocks; loaders: give indices
  └─► serving_observer: what they share ──┘     └─► row_batches: of batch_form, pieces
                                                      ├─► short_forward: from frozen blocks up
                                                      └─► forward_call, batch_entry: whose rows?
epoch_policy, serving_observer
  └─► freeze_observer: asks a policy ─► step_times: what freezing saves ─► freeze_advice: says it
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipetransformer.loop.cached_loop import CachedLoop, attach
from pipetransformer.loop.freeze_advice import FreezeAdvice
from pipetransformer.loop.part_check import refuse_wrong_rows
from pipetransformer.loop.token_log_probs import TokenAnswer, TokenLogProbs
from pipetransformer.loop.top_logits import TopAnswer, TopLogits

if TYPE_CHECKING:
    from pipetransformer.loop.lightning_callback import LightningFreezeCallback
    from pipetransformer.loop.transformers_callback import FreezeCallback

__all__ = [
    "CachedLoop", "FreezeAdvice", "FreezeCallback", "LightningFreezeCallback", "TokenAnswer",
    "TokenLogProbs", "TopAnswer", "TopLogits", "attach", "refuse_wrong_rows",
]  # fmt: skip

_LAZY = {
    "FreezeCallback": "transformers_callback",
    "LightningFreezeCallback": "lightning_callback",
}


def __getattr__(name: str) -> Any:
    """Import a callback only when asked: each needs its own framework."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pipetransformer.loop.{_LAZY[name]}"), name)

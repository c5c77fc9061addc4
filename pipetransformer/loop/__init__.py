"""Freeze a model's bottom blocks, and cache what they compute, in a training loop of one's own.

cached_loop: a loop, epoch by epoch ──────┬─► rows: what is frozen comes from rows
callbacks of transformers and Lightning   │     ├─► forward: the model's own, from a row up
  └─► serving_observer: what they share ──┤     └─► batches: of a loader, and whose rows they are
                                          └─► policy: what freezes, and what that saves
answers: what losses read of a frozen model
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipetransformer.loop.answers import TokenAnswer, TokenLogProbs, TopAnswer, TopLogits
from pipetransformer.loop.cached_loop import CachedLoop, attach
from pipetransformer.loop.policy import FreezeAdvice
from pipetransformer.loop.rows import refuse_wrong_rows

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

"""Advise which layers of any training run could freeze, and what that would save.

callbacks: FreezeAdvisor (transformers), LightningFreezeAdvisor
    └─► observer ─► step_times: what a step's layers cost ─► trial_forward: what if frozen
                 ├► thaw_check: could what thaws train?
                 └► advice: text, picture
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from freeze.advisor.advice import Advice
from freeze.advisor.observer import Observer, learning_rates
from freeze.advisor.thaw_check import ThawCheck

if TYPE_CHECKING:
    from freeze.advisor.lightning_callback import LightningFreezeAdvisor
    from freeze.advisor.transformers_callback import FreezeAdvisor

__all__ = [
    "Advice", "FreezeAdvisor", "LightningFreezeAdvisor", "Observer", "ThawCheck", "learning_rates",
]  # fmt: skip

_LAZY = {"FreezeAdvisor": "transformers_callback", "LightningFreezeAdvisor": "lightning_callback"}


def __getattr__(name: str) -> Any:
    """Import a callback only when asked: each needs its own framework."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"freeze.advisor.{_LAZY[name]}"), name)

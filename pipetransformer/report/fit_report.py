"""Sum up what a run took and reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class FitReport:
    """Sum up a run; its seconds are training, observing and transitions, without evaluation.

    Args:
        cache_bytes: the most that rank 0's node took for activations of training samples.
        metrics, evaluated_at: of the last evaluation of the eval_dataset, and after which step.
        best_metric: the best `metric_for_best_model` of these evaluations, and after which step;
            None before the first.
    """

    seconds: float = 0.0
    samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    transitions: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    best_metric: float | None = None
    best_step: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

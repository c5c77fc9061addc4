"""Sum up what a run took and reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class FitReport:
    """Sum up a run, from its start on, whatever resumes it.

    Every figure is the whole run's, the same on all ranks, but for `seconds`, those of each of
    `transitions`, and `cache_bytes`: these are this rank's and its node's, since a resume, and
    rank 0's and its node's before.

    Args:
        seconds: of training, observing and transitions, without evaluation.
        samples: trained on, of all replicas.
        cache_hits, cache_misses: of these, those behind a frozen prefix whose activations were
            read, and those whose were computed, by all or some of its layers.
        cache_upgrades: of the latter those that were read, and computed on from there by the
            layers that had frozen since.
        cache_spared_s: about how many seconds of forwards, of all devices together, were so not
            computed, by the times that were measured.
        cache_bytes: the most that a node took for activations of training samples.
        metrics, evaluated_at: of the last evaluation of the eval_dataset, and after which step.
        best_metric: the best `metric_for_best_model` of these evaluations, and after which step;
            None before the first.
    """

    seconds: float = 0.0
    samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_upgrades: int = 0
    cache_spared_s: float = 0.0
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

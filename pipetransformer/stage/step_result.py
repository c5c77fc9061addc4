"""Say what a step came to on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from autocache import CacheStats


@dataclass(frozen=True)
class StepNumbers:
    """Hold what a step computed; see `StepResult`."""

    loss: float
    gradient_norm: float
    skipped: bool


Numbers: TypeAlias = StepNumbers | Callable[[], StepNumbers]
"""What a step computed, or a function that waits for it."""


@dataclass(frozen=True)
class StepResult:
    """Report a training step.

    Args:
        numbers: what it computed; a function on a run's only GPU.
        seconds, breakdown: this rank's time, in all and by what it was spent on.
        stops: whether a rank has asked to end the run.
        stats: of this rank's cache.
        cache_hits, cache_misses: samples of all replicas whose activations were read, or computed.
        cache_upgrades: those misses of which a lower layer's activations were read.
        cache_ahead: samples computed for steps to come, which count them as hits.
    """

    numbers: Numbers
    seconds: float
    breakdown: Mapping[str, float]
    stops: bool = False
    stats: CacheStats = field(default_factory=CacheStats)
    cache_hits: int = 0
    cache_misses: int = 0
    cache_upgrades: int = 0
    cache_ahead: int = 0

    @classmethod
    def of(
        cls,
        numbers: Numbers,
        sums: StepSums,
        stats: CacheStats,
        *,
        seconds: float,
        spent_s: Mapping[str, float],
    ) -> StepResult:
        """Report a step of which all ranks told `sums`; what `spent_s` leaves is "other"."""
        breakdown = {**spent_s, "other": seconds - sum(spent_s.values())}
        counts = map(int, (sums.hits, sums.misses, sums.upgrades, sums.ahead))
        return cls(numbers, seconds, breakdown, sums.stops > 0, stats, *counts)

    @property
    def is_known(self) -> bool:
        """Return whether the numbers are here, and need not be waited for."""
        return isinstance(self.numbers, StepNumbers)

    @property
    def loss(self) -> float:
        """Return the mean over the global batch."""
        return self._known.loss

    @property
    def gradient_norm(self) -> float:
        """Return the whole model's, before clipping."""
        return self._known.gradient_norm

    @property
    def skipped(self) -> bool:
        """Return whether a non-finite number made every rank leave its weights as they were."""
        return self._known.skipped

    @property
    def _known(self) -> StepNumbers:
        return self.numbers if isinstance(self.numbers, StepNumbers) else self.numbers()


@dataclass(frozen=True)
class StepSums:
    """Hold what a rank tells of a step, or what all do, added up.

    Args:
        loss, count: the losses' sum, and what their mean divides it by.
        split: ranks whose loss depends on how the batch is split.
        trained: micro-batches whose loss had a gradient.
        early: ranks whose gradients were summed before they were complete.
        wrong: ranks that found something wrong.
        stops: ranks that ask to end the run.
        squares: the gradient's squared norm.
        hits, misses, upgrades, ahead: samples; see `StepResult`.
    """

    loss: float = 0.0
    count: float = 0.0
    split: float = 0.0
    trained: float = 0.0
    early: float = 0.0
    wrong: float = 0.0
    stops: float = 0.0
    squares: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    upgrades: float = 0.0
    ahead: float = 0.0

    def as_list(self) -> list[float]:
        return [*map(float, vars(self).values())]

    @classmethod
    def of(cls, values: Iterable[float]) -> StepSums:
        return cls(*values)

"""Say what a step came to on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field

from autocache import CacheStats


@dataclass(frozen=True)
class StepNumbers:
    """Hold what a step computed.

    Args:
        loss: mean over the global batch.
        gradient_norm: of the whole model, before clipping.
        skipped: whether a non-finite number made every rank leave its weights as they were.
    """

    loss: float
    gradient_norm: float
    skipped: bool


@dataclass(frozen=True)
class StepResult:
    """Report a training step.

    Args:
        numbers: what it computed; on the only GPU of a run a function that waits for that.
        seconds: this rank's time, in all and by what it was spent on.
        stops: whether a rank has asked to end the run.
        stats: of this rank's cache.
        cache_hits, cache_misses: samples of all replicas whose activations were read, or computed.
        cache_upgrades: of the latter those that were read, and computed on from there.
    """

    numbers: StepNumbers | Callable[[], StepNumbers]
    seconds: float
    breakdown: Mapping[str, float]
    stops: bool = False
    stats: CacheStats = field(default_factory=CacheStats)
    cache_hits: int = 0
    cache_misses: int = 0
    cache_upgrades: int = 0

    @property
    def is_known(self) -> bool:
        """Tell whether nothing need be waited for."""
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
        """Tell whether a non-finite number made every rank leave its weights as they were."""
        return self._known.skipped

    @property
    def _known(self) -> StepNumbers:
        return self.numbers if isinstance(self.numbers, StepNumbers) else self.numbers()


@dataclass(frozen=True)
class StepEnd:
    """Say how a step ended on a rank: as in a `StepResult`, with the seconds behind its backwards.

    Args:
        sums: what all ranks told.
        compute_s, idle_s, reduce_s: computing, waiting for other ranks, summing.
    """

    numbers: StepNumbers | Callable[[], StepNumbers]
    sums: StepSums
    compute_s: float = 0.0
    idle_s: float = 0.0
    reduce_s: float = 0.0


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
        squares: the gradient's squared norm, where it is not summed at once.
        hits, misses: samples whose activations were read, and computed.
        upgrades: of the latter those that were read, and computed on from there.
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

    def as_list(self) -> list[float]:
        return list(map(float, astuple(self)))

    @classmethod
    def of(cls, values: Iterable[float]) -> StepSums:
        return cls(*values)


def broken_down(seconds: float, **parts: float) -> dict[str, float]:
    """Return a step's seconds by what they were spent on; "other" is what the parts leave."""
    return {**parts, "other": seconds - sum(parts.values())}

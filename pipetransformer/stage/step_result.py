"""Say what a step came to on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class StepResult:
    """Report a training step.

    Args:
        loss: mean over the global batch.
        gradient_norm: of the whole model, before clipping.
        skipped: whether a non-finite number made every rank leave its weights as they were.
        seconds: this rank's time, in all and by what it was spent on.
        stops: whether a rank has asked to end the run.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    seconds: float
    breakdown: Mapping[str, float]
    stops: bool = False


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
    """

    loss: float = 0.0
    count: float = 0.0
    split: float = 0.0
    trained: float = 0.0
    early: float = 0.0
    wrong: float = 0.0
    stops: float = 0.0
    squares: float = 0.0

    def as_list(self) -> list[float]:
        return list(map(float, astuple(self)))

    @classmethod
    def of(cls, values: Iterable[float]) -> StepSums:
        return cls(*values)


def broken_down(seconds: float, **parts: float) -> dict[str, float]:
    """Return a step's seconds by what they were spent on; "other" is what the parts leave."""
    return {**parts, "other": seconds - sum(parts.values())}

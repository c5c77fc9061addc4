"""Say what a step came to on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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


def broken_down(seconds: float, **parts: float) -> dict[str, float]:
    """Return a step's seconds by what they were spent on; "other" is what the parts leave."""
    return {**parts, "other": seconds - sum(parts.values())}

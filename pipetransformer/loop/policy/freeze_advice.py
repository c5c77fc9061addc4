"""Say what a training's layers did, which have frozen when, and what that saves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetransformer.loop.policy.step_times import StepCosts


@dataclass(frozen=True)
class Look:
    """Hold what a policy said after a step, and the layers' relative updates before it.

    An update is None if its layer does not train.
    """

    step: int
    num_frozen: int
    updates: tuple[float | None, ...]
    reason: str


@dataclass(frozen=True)
class FreezeAdvice:
    """Hold what was seen of a training so far; `str` says it in a sentence.

    Args:
        dry_run: whether layers were only watched.
        looks: what the policy said, oldest first.
        costs: seconds of a step, None if no step was timed before layers froze.
    """

    num_layers: int
    dry_run: bool
    looks: tuple[Look, ...]
    costs: StepCosts | None

    @property
    def num_frozen(self) -> int:
        return self.looks[-1].num_frozen if self.looks else 0

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """Return after which steps another number of layers froze, and that number."""
        numbers = [0, *(look.num_frozen for look in self.looks)]
        return tuple(
            (look.step, look.num_frozen)
            for look, before in zip(self.looks, numbers, strict=False)
            if look.num_frozen != before
        )

    @property
    def course(self) -> str:
        """Return what froze when."""
        if not self.looks:
            return "no advice yet: the policy was not asked"
        last, would = self.looks[-1], "would have frozen" if self.dry_run else "froze"
        if not self.changes:
            return f"no layer {would} by step {last.step}: {last.reason}"
        when = ", ".join(f"{number} after step {step}" for step, number in self.changes)
        return f"of {self.num_layers} layers {would}: {when}"

    def __str__(self) -> str:
        text = self.course
        if self.costs is None or not self.num_frozen:
            return text
        plain, cached = (self.costs.saved_share(self.num_frozen, cached=c) for c in (False, True))
        does = "would save" if self.dry_run else "saves"
        return f"{text}. That {does} at least {plain:.0%} of each step, {cached:.0%} with rows"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write all of it to a file, as JSON."""
        Path(path).write_text(json.dumps({**asdict(self), "text": str(self)}, indent=1))

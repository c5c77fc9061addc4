"""State what is decided at a step boundary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopipe.plan import PipelinePlan
from freeze import FreezeContext


@dataclass(frozen=True)
class Decision:
    """State what holds from a step on; rank 0 journals it, then publishes it.

    Args:
        step: the first step it holds for.
        num_frozen: frozen layers.
        plan: the pipeline over the others.
        use_cache: whether the prefix's activations are cached.
        reason: in one line.
        resting: layers above them whose weights do not train.
    """

    step: int
    num_frozen: int
    plan: PipelinePlan
    use_cache: bool
    reason: str
    resting: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "plan": self.plan.to_json()}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Decision:
        """Rebuild a decision from `to_json`."""
        plan, resting = PipelinePlan.from_json(values["plan"]), tuple(values["resting"])
        return Decision(**{**values, "plan": plan, "resting": resting})

    def changes(self, current: Decision | None) -> bool:
        """Return whether ranks must do anything to go from the current decision to this one."""
        return current is None or self._effect() != current._effect()

    def _effect(self) -> tuple[Any, ...]:
        plan = self.plan
        return (
            self.num_frozen,
            self.resting,
            self.use_cache,
            plan.boundaries,
            plan.num_micro_batches,
            plan.manner,
        )


@dataclass(frozen=True)
class Proposal:
    """Hold a decision, and on rank 0 what it rests on; see `elasticity.Change`."""

    decision: Decision
    context: FreezeContext | None = None
    confidence: str = ""

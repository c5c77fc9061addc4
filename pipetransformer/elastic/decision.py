"""State what is decided at a step boundary, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopipe.plan import PipelinePlan
from freeze import FreezeContext
from pipetransformer.elastic.costs import REVIEW_STEPS


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
    """Hold a decision, and on rank 0 what it rests on; see `Change`."""

    decision: Decision
    context: FreezeContext | None = None
    confidence: str = ""


@dataclass(frozen=True)
class Change:
    """Report what happened between two steps.

    Args:
        before: what held so far; None at the start.
        decision: what holds from now on.
        is_transition: whether anything had to be done for it.
        seconds: deciding and carrying out.
        predicted_s: what carrying out was predicted to take.
        bytes_moved: what all ranks received.
        step_before_s: a recent step's seconds in the long run; None if not known.
        confidence: how sure a new plan is, on rank 0; "" if nothing was planned.
        context: what the policy has seen, on rank 0; None if it was not asked.
        look_s: seconds of a forward of the probe batch.
        observe_s: seconds of reading all signals, a look included.
    """

    before: Decision | None
    decision: Decision
    is_transition: bool
    seconds: float
    predicted_s: float
    bytes_moved: int
    step_before_s: float | None
    confidence: str = ""
    context: FreezeContext | None = None
    look_s: float = 0.0
    observe_s: float = 0.0


@dataclass(frozen=True)
class Review:
    """Say when a new pipeline is compared with the pipeline before it.

    Args:
        step: the step before which they are compared.
        left: the pipeline before.
        was_measured: whether its steps were watched for long enough.
    """

    step: int
    left: PipelinePlan
    was_measured: bool

    @staticmethod
    def of(before: Decision | None, decision: Decision, *, was_measured: bool) -> Review | None:
        """Return when a decision is reviewed; None if K and M stayed."""
        plans = (before or decision).plan, decision.plan
        if len({(plan.length, plan.num_micro_batches) for plan in plans}) == 1:
            return None
        return Review(decision.step + REVIEW_STEPS, plans[0], was_measured)

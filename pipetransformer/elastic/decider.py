"""Decide at a step boundary: ask the policy, plan, journal, publish.

Rank 0 decides; every rank calls at the same steps and hears the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autodp import broadcast_json
from autopipe.plan import PipelinePlan
from freeze import (
    JOURNAL_FILE,
    FreezeContext,
    FreezePolicy,
    PolicyError,
    checked_decision,
    frozen_since,
    sets_rates,
)
from pipetransformer.elastic.costs import plan_name
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.journal import Journal
from pipetransformer.elastic.observing import Observed
from pipetransformer.elastic.run_planner import RunPlanner
from pipetransformer.feed import Clock
from pipetransformer.model import Task
from pipetransformer.processes import World

_NOISE = 0.03
"""Share by which medians of a few steps may differ without meaning anything."""

_PLANNED_FOR = (
    "global_batch_size", "scale_batch", "memory_limit_bytes", "pipeline_length", "max_replicas",
    "micro_batches", "micro_batch_size", "schedule",
)  # fmt: skip
"""Settings that a plan depends on."""


def plan_shape(task: Task, world: World) -> dict[str, Any]:
    """Name what a plan was made for, as plain values; another one needs another plan."""
    workers = world.stage_workers
    return {
        "num_ranks": world.size,
        "slots_per_node": world.slots_per_node,
        **{name: getattr(task.config, name) for name in _PLANNED_FOR},
        "stage_workers": workers and list(workers),  # As JSON gives it back.
    }


class Decider:
    """Decide for a run, and hold what was decided."""

    def __init__(
        self, task: Task, world: World, *, policy: FreezePolicy, planner: RunPlanner
    ) -> None:
        self._task = task
        self._world = world
        self.policy, self.planner = policy, planner
        self._shape = plan_shape(task, world)
        self._described: dict[str, Any] = {"world": self._shape}
        if sets_rates(policy, task.model.num_layers):
            self._described["sets_rates"] = True  # Which decisions alone do not tell.
        self._journal: Journal | None = None
        self.current: Decision | None = None
        self.frozen_since: tuple[int, ...] = ()
        self.context: FreezeContext | None = None
        self.sureness = ""

    def open_journal(self, *, from_step: int | None) -> None:
        """Record decisions in the run's folder; replay those of steps from `from_step` on."""
        folder = self._task.config.folder
        if folder is not None and self._world.is_main:
            self._journal = Journal(Path(folder) / JOURNAL_FILE, from_step=from_step or 0)

    def decide(self, clock: Clock, observed: Observed) -> Decision:
        """Return what holds from the coming step on. Collective.

        On rank 0 `context` is then what the policy has seen, and `sureness` how sure a plan is
        that differs from the one before.

        Raises:
            RuntimeError: the policy or the planner failed; rank 0 raises its very error.
        """
        return self._publish(clock.step, lambda: self._decide(clock, observed))

    def replan(self, clock: Clock) -> None:
        """Plan what is frozen now anew, for a world of another size. Collective.

        It is no decision and not journaled: the one recorded for the coming step is still to be
        replayed.

        Raises:
            RuntimeError: see `decide`.
        """
        current = self.current
        assert current is not None

        def plan() -> Decision:
            pipeline, use_cache = self.planner.plan(
                clock, current.num_frozen, current, current.resting
            )
            return replace(current, plan=pipeline, use_cache=use_cache)

        self.current = self._publish(None, plan)

    def review(self, clock: Clock, left: PipelinePlan, measured_s: float | None) -> Decision:
        """Return what holds after another plan's first steps: that, or the one left. Collective.

        Args:
            clock: of the coming step.
            left: the plan that was left for the current one.
            measured_s: what steps of the current one take in the long run; None where that is not
                known.
        """
        return self._publish(clock.step, lambda: self._review(clock, left, measured_s))

    def _publish(self, step: int | None, make: Callable[[], Decision]) -> Decision:
        """Make a decision on rank 0, journal it under its step, and tell every rank."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                answer = {"decision": make().to_json()}
                if self._journal is not None and step is not None:
                    self._journal.append({"step": step, **self._described, **answer})
            except Exception as error:
                by_policy = str(error) if isinstance(error, PolicyError) else ""
                told = {"error": repr(error), "by_policy": by_policy}
                broadcast_json(told, group=self._world.group)
                raise
        answer = broadcast_json(answer, group=self._world.group)
        if answer.get("by_policy"):
            raise PolicyError(f"rank 0: {answer['by_policy']}")
        if "error" in answer:
            raise RuntimeError(f"rank 0 could not decide: {answer['error']}")
        return Decision.from_json(answer["decision"])

    def executed(self, decision: Decision, seconds: float | None) -> None:
        """Note that a decision holds now, and what the transition cost."""
        if seconds is not None and self.current is not None:
            self.planner.note_transition(self.current.plan, decision.plan, seconds)
        self.frozen_since = frozen_since(self.frozen_since, decision.num_frozen, decision.step)
        self.current = decision

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        assert self.current is not None
        return {
            "policy": self.policy.state_dict(),
            "current": self.current.to_json(),
            "frozen_since": list(self.frozen_since),
            "planner": self.planner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.current = Decision.from_json(state["current"])
        self.frozen_since = tuple(state["frozen_since"])
        self.planner.load_state_dict(state["planner"])

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _decide(self, clock: Clock, observed: Observed) -> Decision:
        self.context, self.sureness = self._context(clock, observed), ""
        # On a replay too: the policy's state must go on.
        freeze = checked_decision(self.policy, self.context)
        recorded, fits = self._recorded(clock.step)
        if recorded is not None and fits:
            return recorded
        # Another world needs another pipeline, but what was frozen must stay what it was.
        held = recorded or freeze
        plan, use_cache = self.planner.plan(clock, held.num_frozen, self.current, held.resting)
        made = Decision(clock.step, held.num_frozen, plan, use_cache, held.reason, held.resting)
        if made.changes(self.current):
            self.sureness = self.planner.sureness(clock, self.current, made)
        return made

    def _context(self, clock: Clock, observed: Observed) -> FreezeContext:
        """Return what the policy sees."""
        current, plan_for = self.current, self.planner.plan
        num_frozen, resting = (current.num_frozen, current.resting) if current else (0, ())
        return FreezeContext(
            **asdict(clock),
            layers=observed.layers(self._task, num_frozen, resting),
            num_frozen=num_frozen,
            resting=resting,
            frozen_since=self.frozen_since,
            metrics=observed.metrics,
            evaluated_at=observed.evaluated_at,
            loss=observed.loss,
            loss_slope=observed.loss_slope,
            mean_learning_rate=observed.mean_learning_rate,
            predict=lambda frozen: plan_for(clock, frozen, current)[0].predicted_step_s,
        )

    def _recorded(self, step: int) -> tuple[Decision | None, bool]:
        """Return what the journal to repeat has for a step, and whether it fits this world."""
        entry = self._journal.recorded(step) if self._journal is not None else None
        if entry is None:
            return None, False
        return Decision.from_json(entry["decision"]), entry["world"] == self._shape

    def _review(self, clock: Clock, left: PipelinePlan, measured_s: float | None) -> Decision:
        current = self.current
        assert current is not None
        recorded, fits = self._recorded(clock.step)
        if recorded is not None and fits:
            return recorded
        kept = replace(current, step=clock.step, reason=f"kept: {current.reason}")
        if measured_s is None:
            return kept
        back = self.planner.same_stages(clock, current, left)
        # Told apart from a machine that became slower by how soon the one followed the other.
        slower = measured_s / max(current.plan.predicted_step_s, 1e-9)
        self.planner.calibration.correct(current.plan, slower)
        kept = replace(kept, plan=current.plan.lengthened(slower))
        if back is None or measured_s <= (1 + _NOISE) * back.predicted_step_s:
            return kept
        reason = (
            f"back to {plan_name(left)}: {plan_name(current.plan)} takes {measured_s:.3g} s "
            f"a step, instead of {back.predicted_step_s:.3g} s"
        )
        return replace(kept, plan=back, reason=reason)

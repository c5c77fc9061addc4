"""Change what trains, between two steps: measure, decide, and carry the decision out.

policy -> decider -> decision, journaled and published -> deployment -> change, to be recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autodp import broadcast_json, gather_json
from freeze import FreezePolicy
from pipetransformer.data import Batch
from pipetransformer.job import Task
from pipetransformer.measure import MEASURE_GUESS_S, Measurements, measure
from pipetransformer.position import Clock, Timeline
from pipetransformer.processes import World, free_bytes, tightest
from pipetransformer.transition.decider import Decider
from pipetransformer.transition.decision import Decision
from pipetransformer.transition.deployment import Deployment
from pipetransformer.transition.pace import Pace


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
        measured_s: measuring anew, before the decision; None where that was not done.
        step_before_s: what steps took of late; None where that is not known.
    """

    before: Decision | None
    decision: Decision
    is_transition: bool
    seconds: float
    predicted_s: float
    bytes_moved: int
    measured_s: float | None
    step_before_s: float | None


class Transitions:
    """Lead a run from decision to decision, from what was measured.

    Args:
        task, world: what is trained, and where.
        deployment: what decisions are carried out on.
        timeline: where the run is.
        read: reads samples of the training set to measure with; ids may exceed its length.
        peak_learning_rate: of the first parameter group, at a factor of 1.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        deployment: Deployment,
        timeline: Timeline,
        read: Callable[[Tensor], Batch],
        peak_learning_rate: float,
    ) -> None:
        self._task, self._world = task, world
        self._deployment, self._timeline = deployment, timeline
        self._read = read
        self._peak_learning_rate = peak_learning_rate
        self._measure_s = MEASURE_GUESS_S
        self._decider: Decider | None = None
        self._pace = Pace()

    @property
    def have_begun(self) -> bool:
        """Tell whether decisions are possible."""
        return self._decider is not None

    @property
    def decider(self) -> Decider:
        """Return what decides; there is one from `begin` on."""
        assert self._decider is not None
        return self._decider

    @property
    def replicas(self) -> int:
        """Return how many pipelines train; 1 before the first decision."""
        stage = self._deployment.stage
        return stage.topology.replicas if stage else 1

    def clock(self) -> Clock:
        """Describe the coming step to a policy."""
        return self._timeline.clock(self.replicas, self._peak_learning_rate)

    def begin(self, policy: FreezePolicy, kept: Measurements | None) -> None:
        """Measure, where nothing usable was kept; decisions are then possible. Collective."""
        limit = self._memory_limit_bytes()
        self._decider = Decider(
            self._task,
            self._world,
            policy=policy,
            measurements=kept or self._measure(),
            memory_limit_bytes=limit,
        )

    def measure(self) -> Measurements:
        """Measure anew, for the decisions to come. Collective."""
        self.decider.measurements = self._measure()
        return self.decider.measurements

    def decide_if_due(self, metrics: Mapping[str, float]) -> Change | None:
        """Decide where a decision precedes the coming step. Collective there."""
        current = self.decider.current
        if current is not None and not self._timeline.decision_due(current.step):
            return None
        return self._decide(metrics)

    def note_step(self, seconds: float, *, filled_cache: bool) -> float | None:
        """Watch what steps take; return that once for every plan, when it is known."""
        if not filled_cache and self._pace.note(seconds):
            return self._pace.median_s
        return None

    def continue_from(self, decision: Decision, *, measured_anew: bool) -> None:
        """Watch the steps of a decision that a checkpoint holds."""
        self._pace.begin(decision.plan.predicted_step_s, measured_anew=measured_anew)

    def close(self) -> None:
        """Close the journal."""
        if self._decider is not None:
            self._decider.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        return {"decider": self.decider.state_dict(), "usual_pace": self._pace.usual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.decider.load_state_dict(state["decider"])
        self._pace.usual = state["usual_pace"]

    def _decide(self, metrics: Mapping[str, float]) -> Change:
        """Take a decision and carry it out. Collective."""
        before, stage = self.decider.current, self._deployment.stage
        step_before_s = self._pace.median_s
        measured_s = self._measure_if_drifted() if before is not None else None
        start = time.perf_counter()
        decision = self.decider.decide(self.clock(), stage.signals if stage else None, metrics)
        predicted_s = self.decider.predict_transition_s(decision.plan)
        is_transition, moved = decision.changes(before), 0
        if is_transition:
            # The transition ends when its last rank is done.
            moved = sum(gather_json(self._deployment.change(decision), group=self._world.group))
        seconds = time.perf_counter() - start
        self.decider.executed(decision, seconds if is_transition else None)
        if is_transition or measured_s is not None:
            self._pace.begin(decision.plan.predicted_step_s, measured_anew=measured_s is not None)
        return Change(
            before,
            decision,
            is_transition,
            seconds,
            predicted_s,
            moved,
            measured_s,
            step_before_s,
        )

    def _memory_limit_bytes(self) -> int | None:
        """Return what is free on the fullest GPU, or less where the user says so. Collective."""
        free = gather_json(free_bytes(self._world.device), group=self._world.group)
        return tightest((self._task.config.memory_limit_bytes, *free))

    def _measure(self) -> Measurements:
        start = time.perf_counter()
        held_bytes = self._deployment.held_bytes()
        measurements = measure(self._task, self._world, self._read, held_bytes=held_bytes)
        self._measure_s = time.perf_counter() - start
        return measurements

    def _measure_if_drifted(self) -> float | None:
        """Measure anew where steps have drifted; return the seconds that took. Collective."""
        remaining = self._timeline.max_steps(self.replicas) - self._timeline.position.step
        is_worth = self._pace.has_drifted_enough(remaining_steps=remaining, cost_s=self._measure_s)
        if not broadcast_json(is_worth, group=self._world.group):
            return None
        self.measure()
        return self._measure_s

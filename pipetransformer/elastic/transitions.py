"""Change what trains, between two steps: measure, decide, and carry the decision out.

policy -> decider -> decision, journaled and published -> deployment -> change, to be recorded
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autodp import gather_json
from autopipe.plan import PipelinePlan, PlanRequest
from freeze import FreezeContext, FreezePolicy
from pipetransformer.elastic.costs import REVIEW_STEPS, Pace, steady_step
from pipetransformer.elastic.decider import Decider
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.deployment import Deployment
from pipetransformer.elastic.observing import Observing
from pipetransformer.elastic.run_planner import RunPlanner
from pipetransformer.feed import Clock, Timeline
from pipetransformer.measure import Measurements, measure
from pipetransformer.model import Task
from pipetransformer.processes import World, free_bytes, plannable_bytes, tightest
from pipetransformer.stage import StepResult


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
        step_before_s: what steps took of late, in the long run; None where that is not known.
        sureness: how sure a new plan is, on rank 0; "" where nothing was planned.
        context: what the policy has seen, on rank 0; None where it was not asked.
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
    sureness: str = ""
    context: FreezeContext | None = None
    look_s: float = 0.0
    observe_s: float = 0.0


@dataclass(frozen=True)
class Review:
    """Say when another pipeline is compared with the one that was left for it.

    Args:
        step: the step before which that is done.
        left: the pipeline that was left.
        was_measured: whether it is known what its steps took.
    """

    step: int
    left: PipelinePlan
    was_measured: bool

    @staticmethod
    def of(before: Decision | None, decision: Decision, *, was_measured: bool) -> Review | None:
        """Return when a decision is reviewed; None where it has brought no other K or M."""
        plans = (before or decision).plan, decision.plan
        if len({(plan.length, plan.num_micro_batches) for plan in plans}) == 1:
            return None
        return Review(decision.step + REVIEW_STEPS, plans[0], was_measured)


class Transitions:
    """Lead a run from decision to decision, from what was measured."""

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        policy: FreezePolicy,
        deployment: Deployment,
        timeline: Timeline,
    ) -> None:
        self._task, self._world = task, world
        self._policy = policy
        self.deployment, self.timeline = deployment, timeline
        self._observing = Observing(task, world, deployment.feed)
        self._decider: Decider | None = None
        self._pace = Pace()
        self._review: Review | None = None
        self._has_just_measured = False

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
    def decision(self) -> Decision | None:
        """Return what holds now; None before `begin`."""
        return None if self._decider is None else self._decider.current

    @property
    def measurements(self) -> Measurements | None:
        """Return what decisions are based on; None before `begin`."""
        return None if self._decider is None else self._decider.planner.measurements

    @property
    def replicas(self) -> int:
        """Return how many pipelines train; 1 before the first decision."""
        stage = self.deployment.stage
        return stage.topology.replicas if stage else 1

    def clock(self) -> Clock:
        """Describe the coming step to a policy."""
        return self.timeline.clock(self.replicas)

    def begin(self, kept: Measurements | None) -> None:
        """Measure, where nothing usable was kept; decisions are then possible. Collective."""
        limit, self._has_just_measured = self._memory_limit_bytes(), kept is None
        planner = RunPlanner(
            self._task,
            self._world,
            measurements=kept or self._measure(),
            memory_limit_bytes=limit,
            may_cache=lambda: self.deployment.feed.may_cache,
        )
        planner.choose_workers(self.clock())
        self._decider = Decider(self._task, self._world, policy=self._policy, planner=planner)

    def measure(self) -> Measurements:
        """Measure for the decisions to come, unless the beginning just did. Collective."""
        if not self._has_just_measured:
            self.decider.planner.use(self._measure())
        self._has_just_measured = False
        return self.decider.planner.measurements

    def plan_request(self, num_frozen: int) -> PlanRequest:
        """Return what a planner would be asked now; possible from `begin` on."""
        decider = self.decider
        return decider.planner.request(self.clock(), num_frozen, decider.current)

    def decide_if_due(
        self, metrics: Mapping[str, float], evaluated_at: int | None
    ) -> Change | None:
        """Decide where a decision, or its review, precedes the coming step. Collective there.

        Args:
            metrics, evaluated_at: of the last evaluation, and after which step it was.
        """
        current = self.decider.current
        if current is None or self.timeline.decision_due(current.step):
            if current is not None and (measured_s := self._pace.training_s) is not None:
                self.decider.planner.calibrate(
                    self.clock(), current, measured_s=measured_s, computed_s=self._pace.computed_s
                )
            return self._decide(metrics, evaluated_at)
        review = self._review
        if review is not None and review.step == self.timeline.position.step:
            measured_s = self._pace.median_s if review.was_measured else None
            change = self._carry_out(
                lambda: self.decider.review(self.clock(), review.left, measured_s)
            )
            self._review = None  # A plan that was gone back to is not reviewed itself.
            return change
        return None

    @property
    def review_step(self) -> int | None:
        """Return the step before which a new plan is reviewed, if one will be."""
        return None if self._review is None else self._review.step

    def look_back(self) -> None:
        """Look at what became of the layers, where looks are taken. Collective."""
        if self._observing.probe is not None:
            self._observing.probe.look(self.deployment.active_stage, self.timeline.position.step)

    def note_step(self, result: StepResult, learning_rate: float) -> float | None:
        """Watch what steps take; return that once for every plan, when it is known."""
        self._has_just_measured = False
        self._observing.note_step(result.loss, learning_rate)
        decision = self.decider.current
        assert decision is not None
        step = steady_step(
            result.breakdown,
            result.stats,
            decision.plan,
            uses_cache=decision.use_cache,
            has_workers=self._task.config.num_workers > 0,
            on_cpu=self._world.device.type == "cpu",
        )
        known = self._pace.note(step, result.breakdown["compute"])
        return self._pace.median_s if known else None

    def close(self) -> None:
        """Close the journal, and let go of the probe's samples."""
        if self._decider is not None:
            self._decider.close()
        if self._observing.probe is not None:
            self._observing.probe.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        review = self._review
        return {
            "decider": self.decider.state_dict(),
            "observing": self._observing.state_dict(),
            "review": review and asdict(review),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.decider.load_state_dict(state["decider"])
        self._observing.load_state_dict(state["observing"])
        if self._observing.probe is not None:
            self._observing.probe.take_up(self.timeline.position.step)
        if (review := state.get("review")) is not None:
            self._review = Review(**{**review, "left": PipelinePlan.from_json(review["left"])})

    def _decide(self, metrics: Mapping[str, float], evaluated_at: int | None) -> Change:
        """Decide on what was observed since the last decision. Collective."""
        start = time.perf_counter()
        step, probe = self.timeline.position.step, self._observing.probe
        observed = self._observing.collect(self.deployment.stage, step)
        observed = replace(observed, metrics=metrics, evaluated_at=evaluated_at)
        observe_s, look_s = time.perf_counter() - start, observed.looked.seconds
        is_first = self.deployment.stage is None
        change = self._carry_out(lambda: self.decider.decide(self.clock(), observed))
        if probe is not None and is_first:
            # What layers are to be compared with.
            look_s = probe.look(self.deployment.active_stage, step).seconds
            observe_s += look_s
        return replace(
            change,
            sureness=self.decider.sureness,
            context=self.decider.context,
            look_s=look_s,
            observe_s=observe_s,
        )

    def _carry_out(self, decide: Callable[[], Decision]) -> Change:
        """Take a decision and carry it out. Collective."""
        before, step_before_s = self.decider.current, self._pace.median_s
        start = time.perf_counter()
        decision = decide()
        predicted_s = self.decider.planner.predict_transition_s(
            before.plan if before else None, decision.plan
        )
        is_transition, moved = decision.changes(before), 0
        if is_transition:
            # The transition ends when its last rank is done.
            moved = sum(gather_json(self.deployment.change(decision), group=self._world.group))
        seconds = time.perf_counter() - start
        self.decider.executed(decision, seconds if is_transition else None)
        if is_transition:
            self._pace = Pace()
            if self._task.config.plan == "fastest":  # Other planners are obeyed, not corrected.
                self._review = Review.of(before, decision, was_measured=step_before_s is not None)
        return Change(before, decision, is_transition, seconds, predicted_s, moved, step_before_s)

    def _memory_limit_bytes(self) -> int | None:
        """Return what plans may take on the fullest GPU, or what the user says. Collective."""
        wanted, device = self._task.config.memory_limit_bytes, self._world.device
        # A user's limit is taken as it is, without a margin, up to what there is.
        free = plannable_bytes(device) if wanted is None else free_bytes(device)
        return tightest((wanted, *gather_json(free, group=self._world.group)))

    def _measure(self) -> Measurements:
        held_bytes = self.deployment.held_bytes()
        read = self.deployment.feed.read_apart
        return measure(self._task, self._world, read, held_bytes=held_bytes)

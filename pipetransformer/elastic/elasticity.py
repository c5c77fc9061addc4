"""Decide between two steps what freezes and which pipeline follows, and carry that out.

    observe ─► choose (rank 0 asks the policy, then the planner) ─► journal, publish ─► move
        ▲                                                                               │
        └──────────────── learn what steps and transitions take ◄────────────── Change ◄┘

A decision that is due asks the policy. A review, some steps after a new pipeline, asks no policy:
it goes back to the pipeline before where that was faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, final

from autodp import gather_json
from autopipe.plan import PipelinePlan, PlanRequest
from autopipe.profile import Profile
from freeze import (
    FreezeContext,
    FreezeDecision,
    FreezePolicy,
    checked_decision,
    frozen_since,
)
from pipetransformer.elastic.costs import Pace, plan_name, steady_step
from pipetransformer.elastic.decision import Change, Decision, Proposal, Review
from pipetransformer.elastic.deployment import Deployment
from pipetransformer.elastic.journal import Publication
from pipetransformer.elastic.observer import Observation, Observer
from pipetransformer.elastic.planner import RunPlanner
from pipetransformer.feed import Clock, SampleFeed, Timeline
from pipetransformer.measure import measure
from pipetransformer.model import Task
from pipetransformer.processes import World, free_bytes, plannable_bytes, tightest
from pipetransformer.stage import StepResult

_LOGGER = logging.getLogger(__name__)

_NOISE = 0.03
"""Share by which medians of a few steps may differ without meaning anything."""


@final
class Elasticity:
    """Hold what is decided, and all that the next decision rests on.

    Attributes:
        decision: what holds now; None before the first.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        policy: FreezePolicy,
        deployment: Deployment,
        feed: SampleFeed,
        timeline: Timeline,
    ) -> None:
        self._task, self._world = task, world
        self._policy = policy
        self.deployment, self.feed, self.timeline = deployment, feed, timeline
        self.decision: Decision | None = None
        self._frozen_since: tuple[int, ...] = ()
        self._observer = Observer(task, world, feed)
        self._planner: RunPlanner | None = None
        self._publication = Publication(task, world)
        self._pace = Pace()
        self._review: Review | None = None
        self._has_just_measured = self._has_told_of_room = False

    @property
    def have_begun(self) -> bool:
        """Return whether decisions are possible."""
        return self._planner is not None

    @property
    def planner(self) -> RunPlanner:
        """Return what chooses pipelines; there is one from `begin` on."""
        assert self._planner is not None
        return self._planner

    @property
    def profile(self) -> Profile | None:
        """Return the measured costs that decisions rest on; None before `begin`."""
        return None if self._planner is None else self._planner.profile

    @property
    def replicas(self) -> int:
        """Return how many pipelines train; 1 before the first decision."""
        stage = self.deployment.stage
        return stage.topology.replicas if stage else 1

    @property
    def review_step(self) -> int | None:
        """Return the step before which a new plan is reviewed, if one will be."""
        return None if self._review is None else self._review.step

    def clock(self) -> Clock:
        """Describe the coming step to a policy."""
        return self.timeline.clock(self.replicas)

    def begin(self, kept: Profile | None) -> None:
        """Measure, where nothing usable was kept; decisions are then possible. Collective."""
        limit, self._has_just_measured = self._memory_limit_bytes(), kept is None
        planner = RunPlanner(
            self._task,
            self._world,
            profile=kept or self._measure(),
            memory_limit_bytes=limit,
            rows=self.feed.keeper,
            rebuild_s=lambda: self.deployment.rebuild_s,
        )
        planner.choose_workers(self.clock())
        self._planner = planner

    def open_journal(self, *, from_step: int) -> None:
        """Record decisions in the run's folder; replay those of steps from `from_step` on."""
        self._publication.open_journal(from_step=from_step)

    def measure(self) -> Profile:
        """Measure for the decisions to come, unless the beginning just did. Collective."""
        if not self._has_just_measured:
            self.planner.use(self._measure())
        self._has_just_measured = False
        return self.planner.profile

    def plan_request(self, num_frozen: int) -> PlanRequest:
        """Return what a planner would be asked now; possible from `begin` on."""
        return self.planner.request(self.clock(), num_frozen, self.decision)

    def decide_if_due(
        self, metrics: Mapping[str, float], evaluated_at: int | None
    ) -> Change | None:
        """Decide where a decision, or its review, precedes the coming step. Collective there.

        Args:
            metrics, evaluated_at: of the last evaluation, and after which step it was.
        Raises:
            RuntimeError: the policy or the planner failed; rank 0 raises its very error.
        """
        current, step = self.decision, self.timeline.position.step
        if current is not None and not self.timeline.decision_due(current.step):
            return self._review_plan() if self.review_step == step else None
        self._calibrate()
        start = time.perf_counter()
        observed = self._observer.collect(self.deployment.stage, step)
        observed = replace(observed, metrics=metrics, evaluated_at=evaluated_at)
        observe_s, look_s = time.perf_counter() - start, observed.look_s
        change = self._decide(partial(self._choose, observed))
        if current is None:  # A look needs a stage. Later ones are compared with this first one.
            _, look_s = self._observer.look(self.deployment.active_stage, step)
            observe_s += look_s
        return replace(change, look_s=look_s, observe_s=observe_s)

    def replan(self) -> None:
        """Plan again for a world of another size, with the same frozen layers. Collective.

        This is not journaled: a decision recorded for the coming step is still to be replayed.
        """
        current, clock = self._current, self.clock()

        def choose() -> Proposal:
            made = self.planner.plan(clock, current.num_frozen, current, current.resting)
            return Proposal(replace(current, plan=made[0], use_cache=made[1]))

        self.decision = self._publication.publish(None, choose).decision

    def look_back(self) -> None:
        """Take a last look at the layers, if the run probes them. Collective."""
        self._observer.look(self.deployment.active_stage, self.timeline.position.step)

    def note_step(self, result: StepResult, learning_rate: float) -> float | None:
        """Watch a step; return once for every plan what its steps take, in seconds."""
        self._has_just_measured = False
        self._observer.note_step(result.loss, learning_rate)
        decision = self._current
        seconds, fetch_s = steady_step(
            result.breakdown,
            result.stats,
            decision.plan,
            uses_cache=decision.use_cache,
            has_workers=self._task.config.num_workers > 0,
            on_cpu=self._world.device.type == "cpu",
        )
        computed_s = result.breakdown["compute"]
        is_known_now = self._pace.note(seconds, fetch_s=fetch_s, computed_s=computed_s)
        return self._pace.median_s if is_known_now else None

    def close(self) -> None:
        """Close the journal, and let go of the probe's samples."""
        self._publication.close()
        self._observer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        return {
            "decider": {
                "policy": self._policy.state_dict(),
                "current": self._current.to_json(),
                "frozen_since": list(self._frozen_since),
                "planner": self.planner.state_dict(),
            },
            "observing": self._observer.state_dict(),
            "review": self._review and asdict(self._review),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        decided = state["decider"]
        self._policy.load_state_dict(decided["policy"])
        self.decision = Decision.from_json(decided["current"])
        self._frozen_since = tuple(decided["frozen_since"])
        self.planner.load_state_dict(decided["planner"])
        self._observer.load_state_dict(state["observing"], self.timeline.position.step)
        if (review := state.get("review")) is not None:
            self._review = Review(**{**review, "left": PipelinePlan.from_json(review["left"])})

    @property
    def _current(self) -> Decision:
        assert self.decision is not None
        return self.decision

    def _calibrate(self) -> None:
        """Correct the costs by what steps took since the last decision. Collective."""
        if self.decision is not None and (measured_s := self._pace.training_s) is not None:
            computed_s = self._pace.computed_s
            self.planner.calibrate(
                self.clock(), self.decision, measured_s=measured_s, computed_s=computed_s
            )

    def _context(self, clock: Clock, observed: Observation) -> FreezeContext:
        """Return what the policy sees."""
        current = self.decision
        num_frozen, resting = (current.num_frozen, current.resting) if current else (0, ())
        plan_for = self.planner.plan
        return FreezeContext(
            **asdict(clock),
            layers=observed.layers(self._task, num_frozen, resting),
            num_frozen=num_frozen,
            resting=resting,
            frozen_since=self._frozen_since,
            metrics=observed.metrics,
            evaluated_at=observed.evaluated_at,
            loss=observed.loss,
            mean_learning_rate=observed.mean_learning_rate,
            predict=lambda frozen: plan_for(clock, frozen, current)[0].predicted_step_s,
        )

    def _choose(self, observed: Observation, clock: Clock) -> Proposal:
        """Ask the policy, then the planner. On rank 0."""
        before, context = self.decision, self._context(clock, observed)
        # A replay asks too, as the policy's own state must go on.
        freeze = checked_decision(self._policy, context)
        recorded, fits = self._publication.recorded(clock.step)
        if recorded is not None and fits:
            return Proposal(recorded, context)
        # Another world needs another pipeline, but what was frozen must stay what it was.
        made = self._made(clock, recorded or freeze, before)
        is_new = made.changes(before)
        return Proposal(
            made, context, self.planner.how_sure(clock, before, made) if is_new else ""
        )

    def _made(
        self, clock: Clock, held: Decision | FreezeDecision, before: Decision | None
    ) -> Decision:
        """Plan for what is to be frozen, or for the most of it that some pipeline has room for.

        Frozen weights all move to stage 0, which may then need more memory than any stage before.

        Raises:
            ValueError: not even what is frozen now has a pipeline, or a user's planner raised.
        """
        least = min(held.num_frozen, before.num_frozen if before is not None else 0)
        refusal, reason = "", held.reason
        for num_frozen in range(held.num_frozen, least - 1, -1):
            try:
                plan, use_cache = self.planner.plan(clock, num_frozen, before, held.resting)
            except ValueError as error:
                if callable(self._task.config.plan) or num_frozen == least:
                    raise
                refusal = refusal or str(error)
                continue
            if refusal:
                reason = f"{reason}; {num_frozen} of {held.num_frozen}, as more fits nowhere"
                self._tell_of_room(held.num_frozen, num_frozen, refusal)
            return Decision(clock.step, num_frozen, plan, use_cache, reason, held.resting)
        raise AssertionError("the last one returns or raises")

    def _tell_of_room(self, wanted: int, num_frozen: int, refusal: str) -> None:
        if not self._has_told_of_room:
            self._has_told_of_room = True
            _LOGGER.warning(
                "%d layers were to be frozen, and %d are: frozen weights lie on stage 0, and %s",
                wanted,
                num_frozen,
                refusal,
            )

    def _review_plan(self) -> Change:
        """Compare a new plan's first steps with the plan before, and choose. Collective."""
        change = self._decide(self._choose_after_review)
        self._review = None  # A plan that was gone back to is not reviewed itself.
        return change

    def _choose_after_review(self, clock: Clock) -> Proposal:
        """Keep a new plan after its first steps, or go back to the one before. On rank 0."""
        current, review = self._current, self._review
        assert review is not None
        measured_s = self._pace.median_s if review.was_measured else None
        recorded, fits = self._publication.recorded(clock.step)
        if recorded is not None and fits:
            return Proposal(recorded)
        continued = replace(current, step=clock.step, reason=f"kept: {current.reason}")
        if measured_s is None:
            return Proposal(continued)
        left = review.left
        back = self.planner.same_stages(clock, current, left)
        # A machine that became slower would look alike, but seldom right after a transition.
        slower = measured_s / max(current.plan.predicted_step_s, 1e-9)
        self.planner.calibration.correct(current.plan, slower)
        continued = replace(continued, plan=current.plan.lengthened(slower))
        if back is None or measured_s <= (1 + _NOISE) * back.predicted_step_s:
            return Proposal(continued)
        reason = (
            f"back to {plan_name(left)}: {plan_name(current.plan)} takes {measured_s:.3g} s "
            f"a step, instead of {back.predicted_step_s:.3g} s"
        )
        return Proposal(replace(continued, plan=back, reason=reason))

    def _decide(self, choose: Callable[[Clock], Proposal]) -> Change:
        """Choose on rank 0, do that on all ranks, and learn what it took. Collective."""
        # Here and not on rank 0 alone: a user's schedule that raises must raise on every rank.
        clock, start = self.clock(), time.perf_counter()
        proposal = self._publication.publish(clock.step, partial(choose, clock))
        decision, before, step_before_s = proposal.decision, self.decision, self._pace.median_s
        before_plan = before.plan if before else None
        predicted_s = self.planner.predict_transition_s(before_plan, decision.plan)
        is_transition, moved = decision.changes(before), 0
        if is_transition:
            received = self.deployment.change(decision)
            self.feed.follow_prefix()
            # Gathering is also the barrier: the transition ends when its last rank is done.
            moved = sum(gather_json(received, group=self._world.group))
        seconds = time.perf_counter() - start
        if is_transition and before is not None:
            self.planner.note_transition(before.plan, decision.plan, seconds)
        self._frozen_since = frozen_since(self._frozen_since, decision.num_frozen, decision.step)
        self.decision = decision
        if is_transition:
            self._pace = Pace()
            if self._task.config.plan == "fastest":  # Other planners are obeyed, not corrected.
                self._review = Review.of(before, decision, was_measured=step_before_s is not None)
        return Change(
            before,
            decision,
            is_transition=is_transition,
            seconds=seconds,
            predicted_s=predicted_s,
            bytes_moved=moved,
            step_before_s=step_before_s,
            confidence=proposal.confidence,
            context=proposal.context,
        )

    def _memory_limit_bytes(self) -> int | None:
        """Return what plans may take on the fullest GPU, or what the user says. Collective."""
        wanted, world = self._task.config.memory_limit_bytes, self._world
        # A user's limit has no margin, as `plannable_bytes` has: it is obeyed up to what is free.
        free = plannable_bytes(world) if wanted is None else free_bytes(world)
        return tightest((wanted, *gather_json(free, group=world.group)))

    def _measure(self) -> Profile:
        held_bytes = self.deployment.held_bytes()
        return measure(self._task, self._world, self.feed.read_apart, held_bytes=held_bytes)

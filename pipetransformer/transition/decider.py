"""Decide at a step boundary: ask the policy, plan, journal, publish.

Rank 0 decides; every rank calls at the same steps and hears the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autodp import broadcast_json, gather_json
from autopipe.plan import PipelinePlan, PlanRequest
from freeze import (
    FreezeContext,
    FreezePolicy,
    GradientSignals,
    LayerStats,
    checked_decision,
    layer_norms,
)
from pipetransformer.job import Task
from pipetransformer.measure import Measurements
from pipetransformer.planning import PlanSituation, complete_request, planner_of, same_stages
from pipetransformer.processes import World
from pipetransformer.run_position import Clock
from pipetransformer.transition.cost import TransitionCost
from pipetransformer.transition.decision import Decision
from pipetransformer.transition.journal import Journal

_NOISE = 0.03
"""Share by which medians of a few steps may differ without meaning anything."""


def plan_shape(task: Task, world: World) -> dict[str, Any]:
    """Name what a plan was made for, as plain values; another one needs another plan."""
    config = task.config
    return {
        "num_ranks": world.size,
        "slots_per_node": world.slots_per_node,
        "global_batch_size": config.global_batch_size,
        "scale_batch": config.scale_batch,
        "memory_limit_bytes": config.memory_limit_bytes,
        "pipeline_length": config.pipeline_length,
        "micro_batches": config.micro_batches,
        "micro_batch_size": config.micro_batch_size,
        "schedule": config.schedule,
    }


class Decider:
    """Hold what decisions depend on: the policy, what was measured, and what was decided before.

    Args:
        task, world: what is trained, and where.
        policy: decides how many layers are frozen.
        measurements: costs on the live devices.
        memory_limit_bytes: what a device slot may use; None for no limit.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        policy: FreezePolicy,
        measurements: Measurements,
        memory_limit_bytes: int | None,
    ) -> None:
        self._task = task
        self._world = world
        self.policy = policy
        self.measurements = measurements
        self._memory_limit_bytes = memory_limit_bytes
        self._shape = plan_shape(task, world)
        self._journal: Journal | None = None
        self.current: Decision | None = None
        self.frozen_since: tuple[int, ...] = ()
        self.transition_cost = TransitionCost(world)
        self._lengthening = 1.0
        self._corrections: dict[str, float] = {}

    def open_journal(self, *, from_step: int | None) -> None:
        """Record decisions in the run's folder; replay those of steps from `from_step` on."""
        folder = self._task.config.folder
        if folder is not None and self._world.is_main:
            self._journal = Journal(Path(folder) / "journal.jsonl", from_step=from_step or 0)

    def decide(
        self, clock: Clock, signals: GradientSignals | None, metrics: Mapping[str, float]
    ) -> Decision:
        """Return what holds from the coming step on. Collective.

        Raises:
            RuntimeError: the policy or the planner failed; rank 0 raises its very error.
        """
        norms = self._gather_norms(signals)
        return self._publish(clock.step, lambda: self._decide(clock, norms, metrics))

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
            pipeline, use_cache = self.plan(clock, current.num_frozen)
            return replace(current, plan=pipeline, use_cache=use_cache)

        self.current = self._publish(None, plan)

    def calibrate(self, measured_s: float) -> None:
        """Take from live steps how much longer they are than the measurements made expect.

        Args:
            measured_s: what steps of the current plan take, without fetching samples.
        """
        assert self.current is not None
        predicted_s = self.current.plan.training_s
        if predicted_s > 0:
            self._lengthening *= measured_s / predicted_s

    def review(self, clock: Clock, left: PipelinePlan, measured_s: float | None) -> Decision:
        """Return what holds after another plan's first steps: that, or the one left. Collective.

        Args:
            clock: of the coming step.
            left: the plan that was left for the current one.
            measured_s: what steps of the current one take, without fetching samples; None where
                that is not known.
        """
        return self._publish(clock.step, lambda: self._review(clock, left, measured_s))

    def _publish(self, step: int | None, make: Callable[[], Decision]) -> Decision:
        """Make a decision on rank 0, journal it under its step, and tell every rank."""
        answer: dict[str, Any] = {}
        if self._world.is_main:
            try:
                answer = {"decision": make().to_json()}
                if self._journal is not None and step is not None:
                    self._journal.append({"step": step, "world": self._shape, **answer})
            except Exception as error:
                broadcast_json({"error": repr(error)}, group=self._world.group)
                raise
        answer = broadcast_json(answer, group=self._world.group)
        if "error" in answer:
            raise RuntimeError(f"rank 0 could not decide: {answer['error']}")
        return Decision.from_json(answer["decision"])

    def executed(self, decision: Decision, seconds: float | None) -> None:
        """Note that a decision holds now, and what the transition cost."""
        if seconds is not None and self.current is not None:
            self.transition_cost.note(
                self.measurements.profile, self.current.plan, decision.plan, seconds=seconds
            )
        kept = self.frozen_since[: decision.num_frozen]
        self.frozen_since = kept + (decision.step,) * (decision.num_frozen - len(kept))
        self.current = decision

    def predict_transition_s(self, plan: PipelinePlan) -> float:
        """Return the seconds that going from the current plan to another is predicted to cost."""
        if self.current is None:
            return 0.0
        return self.transition_cost.predict_s(self.measurements.profile, self.current.plan, plan)

    def plan(self, clock: Clock, num_frozen: int) -> tuple[PipelinePlan, bool]:
        """Return the pipeline for a number of frozen layers, and whether the prefix is cached."""
        current = self.current.plan if self.current else None
        situation = self._situation(clock, num_frozen, current)
        plan = planner_of(self._task.config.plan)(situation)
        return plan, situation.request.prefix_cached_s is not None

    def _situation(
        self, clock: Clock, num_frozen: int, current: PipelinePlan | None
    ) -> PlanSituation:
        return PlanSituation(
            clock.step,
            clock.max_steps - clock.step,
            self.measurements.profile.lengthened(self._lengthening),
            self._request(num_frozen, clock),
            current,
            self.predict_transition_s,
            self._task.config.scale_batch,
            self._correction,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        assert self.current is not None
        return {
            "policy": self.policy.state_dict(),
            "current": self.current.to_json(),
            "frozen_since": list(self.frozen_since),
            "transition_cost": self.transition_cost.state_dict(),
            "lengthening": self._lengthening,
            "corrections": self._corrections,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.policy.load_state_dict(state["policy"])
        self.current = Decision.from_json(state["current"])
        self.frozen_since = tuple(state["frozen_since"])
        self.transition_cost.load_state_dict(state["transition_cost"])
        self._lengthening = state.get("lengthening", 1.0)
        self._corrections = dict(state.get("corrections", {}))

    def forget_times(self) -> None:
        """Start over with what was measured anew, on devices that may be others."""
        self._lengthening, self._corrections = 1.0, {}

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _request(self, num_frozen: int, clock: Clock) -> PlanRequest:
        config, measured = self._task.config, self.measurements
        request = PlanRequest(
            self._world.size,
            self._world.slots_per_node,
            config.global_batch_size,
            num_frozen,
            memory_limit_bytes=self._memory_limit_bytes,
            prefix_chunk=config.prefix_chunk_of(self._world.size),
            lengths=self._lengths(num_frozen),
            micro_batches=None if config.micro_batches is None else (config.micro_batches,),
            micro_batch_size=config.micro_batch_size,
            schedules=("1f1b", "gpipe") if config.schedule is None else (config.schedule,),
        )
        rate = measured.copy_bytes_per_s if config.cache else None
        return complete_request(
            request,
            measured.profile,
            cache_bytes_per_s=rate,
            reads_a_row=self._reads_a_row(clock),
        )

    def _reads_a_row(self, clock: Clock) -> float:
        """Return how often a sample comes again in the run, after it was computed and stored."""
        if self.current is not None and self.current.use_cache:
            return math.inf  # What is stored by now serves deeper layers, too.
        fill_steps = clock.steps_per_epoch * (self._task.config.cache_views or 1)
        return max(0.0, (clock.max_steps - clock.step) / fill_steps - 1)

    def _gather_norms(self, signals: GradientSignals | None) -> dict[str, float]:
        """Bring all sublayers' mean squared norms to every rank, and start a new interval."""
        if signals is None or "gradient_norm" not in self.policy.signals:
            return {}
        gathered = gather_json(signals.collect(), group=self._world.group)
        signals.reset()
        # Replicas report equal values for a sublayer; any one will do.
        return {name: value for one in gathered for name, value in one.items()}

    def _decide(
        self, clock: Clock, norms: Mapping[str, float], metrics: Mapping[str, float]
    ) -> Decision:
        current = self.current.num_frozen if self.current else 0
        context = FreezeContext(
            **asdict(clock),
            layers=self._layers(norms, current),
            num_frozen=current,
            frozen_since=self.frozen_since,
            metrics=metrics,
            predict=lambda frozen: self.plan(clock, frozen)[0].predicted_step_s,
        )
        freeze = checked_decision(self.policy, context)  # On a replay too: its state must go on.
        num_frozen, reason = freeze.num_frozen, freeze.reason
        recorded, fits = self._recorded(clock.step)
        if recorded is not None:
            if fits:
                return recorded
            # Another world needs another pipeline, but what was frozen must stay what it was.
            num_frozen, reason = recorded.num_frozen, recorded.reason
        plan, use_cache = self.plan(clock, num_frozen)
        self._check(plan, clock, num_frozen)
        return Decision(clock.step, num_frozen, plan, use_cache, reason)

    def _recorded(self, step: int) -> tuple[Decision | None, bool]:
        """Return what the journal to repeat has for a step, and whether it fits this world."""
        entry = self._journal.recorded(step) if self._journal is not None else None
        if entry is None:
            return None, False
        return Decision.from_json(entry["decision"]), entry["world"] == self._shape

    def _check(self, plan: PipelinePlan, clock: Clock, num_frozen: int) -> None:
        """Refuse what a user's planner may not return."""
        first = self._task.model.first_active(num_frozen)
        if plan.boundaries[0] != first:
            raise ValueError(
                f"the planner's first boundary is {plan.boundaries[0]}, but with {num_frozen} "
                f"frozen layers the first active sublayer is {first}; plan the active ones"
            )
        config, request = self._task.config, self._request(num_frozen, clock)
        if config.micro_batch_size is None:
            return
        batch = config.global_batch(request.replicas_of(plan.length))
        sizes = replace(request, global_batch=batch).sizes_of(plan.length, plan.num_micro_batches)
        if plan.num_micro_batches != len(sizes):
            raise ValueError(
                f"the planner wants {plan.num_micro_batches} micro-batches, but micro_batch_size "
                f"{config.micro_batch_size} makes {len(sizes)} of a replica's samples; let it "
                "return as many, or leave micro_batch_size out"
            )

    def _review(self, clock: Clock, left: PipelinePlan, measured_s: float | None) -> Decision:
        current = self.current
        assert current is not None
        recorded, fits = self._recorded(clock.step)
        if recorded is not None and fits:
            return recorded
        kept = replace(current, step=clock.step, reason=f"kept: {current.reason}")
        if measured_s is None:
            return kept
        back = same_stages(self._situation(clock, current.num_frozen, left), left)
        # Told apart from a machine that became slower by how soon the one followed the other.
        slower = measured_s / max(current.plan.training_s, 1e-9)
        self._corrections[_name(current.plan)] = self._correction(current.plan) * slower
        kept = replace(kept, plan=current.plan.lengthened(slower))
        if back is None or measured_s <= (1 + _NOISE) * back.training_s:
            return kept
        reason = (
            f"back to {_name(left)}: {_name(current.plan)} takes {measured_s:.3g} s a step, "
            f"instead of {back.training_s:.3g} s"
        )
        return replace(kept, plan=back, reason=reason)

    def _correction(self, plan: PipelinePlan) -> float:
        return self._corrections.get(_name(plan), 1.0)

    def _lengths(self, num_frozen: int) -> tuple[int, ...] | None:
        """Return the length that was set, or the longest below it that the active layers allow."""
        length = self._task.config.pipeline_length
        if length is None:
            return None
        model = self._task.model
        most = min(length, len(model.sublayers) - model.first_active(num_frozen))
        return (max(one for one in self._world.lengths if one <= most),)

    def _layers(self, norms: Mapping[str, float], num_frozen: int) -> tuple[LayerStats, ...]:
        model = self._task.model
        layer_of = {sublayer.name: sublayer.layer for sublayer in model.sublayers}
        values = (
            layer_norms(norms, layer_of, model.num_layers) if norms else (None,) * model.num_layers
        )
        sizes = [0] * (model.num_layers + 1)
        for index, sublayer in enumerate(model.sublayers):
            sizes[sublayer.layer] += sum(
                t.numel()
                for name, t in model.tensors(index).items()
                if name in self._task.trainable
            )
        return tuple(
            LayerStats(
                f"layer {index}",
                index,
                sizes[index],
                values[index] if index >= num_frozen else None,
            )
            for index in range(model.num_layers)
        )


def _name(plan: PipelinePlan) -> str:
    """Name what steps are compared by: pipelines of one name differ by their frozen layers."""
    return f"K = {plan.length}, M = {plan.num_micro_batches}"

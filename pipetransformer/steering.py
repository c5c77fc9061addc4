"""Change what trains, between two steps: measure, decide, and carry the decision out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from autodp import broadcast_json, gather_json
from autopipe import Tables
from freeze import FreezePolicy
from pipetransformer.controller import Controller
from pipetransformer.data import Batch
from pipetransformer.deployment import Deployment
from pipetransformer.device_memory import free_bytes, tightest
from pipetransformer.measure import MEASURE_GUESS_S, Measurements, measure
from pipetransformer.measure_throughput import measure_throughputs
from pipetransformer.planning import planner_of, published_plan
from pipetransformer.run_log import Cost, RunLog
from pipetransformer.run_state import FitReport
from pipetransformer.task import Task
from pipetransformer.timeline import Clock, Timeline
from pipetransformer.world import World


class Steering:
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
        self.controller: Controller | None = None
        self.timing_s: float | None = None
        """Seconds of timing throughputs, where that was done before the first decision."""

    @property
    def active(self) -> Controller:
        """Return the controller; there is one from `begin` on."""
        assert self.controller is not None
        return self.controller

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
        self.controller = Controller(
            self._task,
            self._world,
            policy=policy,
            measurements=kept or self._measure(),
            memory_limit_bytes=limit,
        )
        self._complete_throughputs(self.controller)

    def measure(self) -> Measurements:
        """Measure anew, for the decisions to come. Collective.

        Throughputs for the published rules are measured once, as published.
        """
        throughputs = self.active.measurements.throughputs
        self.active.measurements = replace(self._measure(), throughputs=throughputs)
        return self.active.measurements

    def decide_if_due(self, report: FitReport, log: RunLog) -> None:
        """Decide where a decision precedes the coming step. Collective there."""
        current = self.active.current
        assert current is not None, "the run's first decision is taken when it is set up"
        if self._timeline.decision_due(current.step):
            self.decide(report, log)

    def decide(self, report: FitReport, log: RunLog) -> None:
        """Take a decision, carry it out and note it. Collective."""
        start = time.perf_counter()
        before = self.active.current
        stage = self._deployment.stage
        measured_anew = before is not None and self._measure_if_drifted(log)
        decides = time.perf_counter()
        decision = self.active.decide(
            self.clock(), stage.signals if stage else None, report.metrics
        )
        predicted_s = self.active.predict_transition_s(decision.plan)
        changed = decision.changes(before)
        # The transition ends when its last rank is done.
        moved = sum(
            gather_json(self._deployment.change(decision), group=self._world.group)
            if changed
            else []
        )
        ends = time.perf_counter()
        seconds = ends - decides
        self.active.executed(decision, seconds if changed else None)
        if before is not None:
            report.seconds += ends - start
        if changed:
            cost = Cost(seconds, predicted_s, moved)
            entry = log.transition(before, decision, cost)
            if before is not None:
                report.transitions.append(entry)
        if changed or measured_anew:
            log.pace.begin(decision.plan.predicted_step_s, measured_anew=measured_anew)

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

    def _complete_throughputs(self, controller: Controller) -> None:
        """Time what the published rules choose M from, where they plan. Collective."""
        measured = controller.measurements
        tables: Tables = {}
        if planner_of(self._task.config.plan) is published_plan:
            tables = measured.throughputs
            if not tables:
                start = time.perf_counter()
                trials = controller.published_trials()
                tables = measure_throughputs(
                    self._task, self._world, read=self._read, trials=trials
                )
                self.timing_s = time.perf_counter() - start
        controller.measurements = replace(measured, throughputs=tables)

    def _measure_if_drifted(self, log: RunLog) -> bool:
        """Measure anew where steps no longer take what they took. Collective."""
        step = self._timeline.position.step
        remaining = self._timeline.max_steps(self.replicas) - step
        pays = log.pace.pays(remaining_steps=remaining, cost_s=self._measure_s)
        if not broadcast_json(pays, group=self._world.group):
            return False
        self.measure()
        log.measurement(step, self._measure_s)
        return True

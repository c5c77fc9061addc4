"""Ask the run's planner for its pipelines, with the costs as they are known by now."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from autodp import gather_json
from autopipe.pipedream import pipedream_stages
from autopipe.plan import (
    PipelinePlan,
    PlanRequest,
    confidence,
    near_fastest,
    stage_compute_s,
    step_range,
)
from autopipe.profile import Profile
from pipetransformer.config import PIPEDREAM_PLANS
from pipetransformer.elastic.costs import Calibration, TransitionCost, rest_layers
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.planners import (
    PLANNERS,
    PlanSituation,
    complete_request,
    of_length,
    same_stages,
)
from pipetransformer.feed import Clock, RowKeeper, may_lie_on_gpus, share_of_rows_found
from pipetransformer.model import Task
from pipetransformer.processes import World, told_by_rank_0
from pipetransformer.stage import BatchCut


class RunPlanner:
    """Ask the run's planner, and correct the costs it is given.

    Args:
        profile: as measured.
        memory_limit_bytes: what a device slot may use; None for no limit.
        rows: of the training set; says whether activations may come from the cache.
        rebuild_s: tells the seconds of new groups for another pipeline length.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        profile: Profile,
        memory_limit_bytes: int | None,
        rows: RowKeeper,
        rebuild_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._task, self._world = task, world
        self._rows = rows
        self.profile = profile
        self._memory_limit_bytes = memory_limit_bytes
        self.calibration = Calibration()
        self._transition_cost = TransitionCost(world, rebuild_s=rebuild_s)

    def choose_workers(self, clock: Clock) -> None:
        """Choose each stage's workers for the whole run, as PipeDream does. Collective.

        Other planners choose none.

        Raises:
            ValueError: no pipeline of its fits, on rank 0; see `agree`.
        """
        config = self._task.config
        if config.plan not in PIPEDREAM_PLANS:
            return

        def choose() -> list[int]:
            request = self.request(clock, 0, None)
            hidden_sums = config.plan == "pipedream_paper"
            stages = pipedream_stages(self.profile, request, hidden_sums=hidden_sums)
            return [stage.replicas for stage in stages]

        workers = told_by_rank_0(choose, group=self._world.group)
        # Set this late, as the optimizer needs costs, and measuring them needs the world. No group
        # is open that another topology had asked for: see `Deployment.__init__`.
        self._world.stage_workers = tuple(workers) if len(workers) > 1 else None

    def plan(
        self,
        clock: Clock,
        num_frozen: int,
        current: Decision | None,
        resting: Collection[int] = (),
    ) -> tuple[PipelinePlan, bool]:
        """Return the pipeline for a number of frozen layers, and whether the prefix is cached.

        Args:
            clock: of the coming step.
            current: the decision in force.
            resting: layers above the frozen ones whose weights do not train.
        Raises:
            ValueError: no pipeline is possible, or a user's planner returns an impossible one.
        """
        situation = self._situation(clock, num_frozen, current, resting)
        wanted = self._task.config.plan
        plan = (PLANNERS[wanted] if isinstance(wanted, str) else wanted)(situation)
        self._check(plan, situation)
        return plan, situation.request.prefix_cached_s is not None

    def how_sure(self, clock: Clock, current: Decision | None, decision: Decision) -> str:
        """Return the `confidence` of a decision's plan; "" where there was no choice of ours."""
        plan, config = decision.plan, self._task.config
        if self._world.size == 1 or callable(config.plan):
            return ""
        situation = self._situation(clock, decision.num_frozen, current, decision.resting)
        low_s, high_s = step_range(situation.profile, of_length(situation, plan.length), plan)
        taught, near = situation.correction(plan), []
        # `near_fastest` compares steps: published rules know no spread, and batches that grow are
        # compared by the sample.
        if config.plan == "fastest" and not situation.scale_batch:
            near = near_fastest(situation.profile, situation.request)
            # A plan that was tried has a correction, which the spread of the probes ignores.
            near = [one for one in near if situation.correction(one) == 1]
        range_s = taught * low_s, taught * high_s
        return confidence(range_s, near, plan, current=situation.current)

    def same_stages(
        self, clock: Clock, current: Decision, plan: PipelinePlan
    ) -> PipelinePlan | None:
        """Predict a plan's stages with the layers that are frozen now; None if they do not fit."""
        situation = self._situation(clock, current.num_frozen, current, current.resting)
        return same_stages(situation, plan)

    def calibrate(
        self, clock: Clock, current: Decision, *, measured_s: float, computed_s: float
    ) -> None:
        """Correct the costs by what live steps take. Collective.

        Args:
            clock: of the coming step.
            current: the decision in force.
            measured_s: seconds of its steps, without fetching samples.
            computed_s: in how many of these seconds this rank computed.
        """
        if self._world.device.type != "cpu":
            computed_s = 0.0  # On a GPU it is the time to launch, which tells nothing of speed.
        all_computed_s = gather_json(computed_s, group=self._world.group)
        self.calibration.compare_ranks(all_computed_s, self._expected_s(clock, current))
        predicted = self.same_stages(clock, current, current.plan) or current.plan
        self.calibration.compare_steps(predicted, measured_s)

    def use(self, profile: Profile) -> None:
        """Plan with new costs, and forget what live steps taught about the old ones."""
        self.profile, self.calibration = profile, Calibration()

    def note_transition(self, before: PipelinePlan, after: PipelinePlan, seconds: float) -> None:
        """Learn from what a transition took."""
        self._transition_cost.note(self.profile, before, after, seconds=seconds)

    def predict_transition_s(self, before: PipelinePlan | None, after: PipelinePlan) -> float:
        """Return the seconds that going from one plan to another is predicted to cost."""
        if before is None:
            return 0.0
        return self._transition_cost.predict_s(self.profile, before, after)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know, as plain values."""
        return {
            "transition_cost": self._transition_cost.state_dict(),
            "calibration": asdict(self.calibration),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._transition_cost.load_state_dict(state["transition_cost"])
        taught = state["calibration"]
        self.calibration = Calibration(**{**taught, "slowness": tuple(taught["slowness"])})

    def _situation(
        self, clock: Clock, num_frozen: int, current: Decision | None, resting: Collection[int]
    ) -> PlanSituation:
        """Describe to a planner what holds."""
        before = current.plan if current else None
        depth = self._task.prefix_depth(num_frozen)
        resting = {*resting, *range(depth, num_frozen)}  # They pass a gradient on to tied weights.
        return PlanSituation(
            step=clock.step,
            remaining_steps=clock.max_steps - clock.step,
            profile=rest_layers(self.calibration.applied_to(self.profile), resting),
            request=self.request(clock, depth, current),
            current=before,
            transition_s=partial(self.predict_transition_s, before),
            scale_batch=self._task.config.scale_batch,
            correction=self.calibration.correction,
        )

    def _expected_s(self, clock: Clock, current: Decision) -> list[float]:
        """Return each rank's expected seconds of computing in a step; 0 for a spare."""
        plan, config = current.plan, self._task.config
        situation = self._situation(clock, current.num_frozen, current, current.resting)
        stages = stage_compute_s(situation.profile, of_length(situation, plan.length), plan)
        topology = self._world.topology(plan.length)
        cut = BatchCut(topology.replicas, plan.num_micro_batches, config.micro_batch_size)
        slices = cut.slices(config.global_batch(topology.replicas))
        expected = []
        for rank in range(self._world.size):
            if topology.is_spare(rank):
                expected.append(0.0)
                continue
            # The prediction is of the largest replica, which is the first; others have less to do.
            stage, share = topology.stage_of(rank), slices[topology.replica_of(rank)] / slices[0]
            count = topology.workers[stage]
            # A stage's workers take the micro-batches in turn, some perhaps one more than others.
            num_own_batches = len(range(topology.worker_of(rank), plan.num_micro_batches, count))
            expected.append(
                stages[stage] * share * num_own_batches * count / plan.num_micro_batches
            )
        return expected

    def request(self, clock: Clock, num_frozen: int, current: Decision | None) -> PlanRequest:
        """Return what a planner is asked; see `plan`."""
        config, on_gpu = self._task.config, self._world.device.type == "cuda"
        request = PlanRequest(
            self._world.size,
            self._world.slots_per_node,
            config.global_batch_size,
            num_frozen,
            memory_limit_bytes=self._limit_beside_rows(num_frozen, current),
            prefix_chunk=config.prefix_chunk_of(self._world.size, on_gpu=on_gpu),
            lengths=self._lengths(num_frozen),
            max_replicas=config.most_replicas(),
            stage_workers=self._world.stage_workers,
            micro_batches=self._micro_batches(num_frozen),
            micro_batch_size=config.micro_batch_size,
            schedules=self._schedules(),
            recompute=config.recompute,
        )
        return complete_request(
            request,
            self.profile,
            rows_found=self._rows.may_cache * share_of_rows_found(config, self._world),
            on_gpu=on_gpu,
            in_gpu_memory=on_gpu and may_lie_on_gpus(config, self._world),
            reads_a_row=self._reads_a_row(clock, current),
        )

    def _limit_beside_rows(self, num_frozen: int, current: Decision | None) -> int | None:
        """Return what a plan may take where rows lie on GPUs, but no less than the present one.

        A thaw may take all, as rows of deeper layers are of no use then. A user's limit is obeyed.
        """
        limit, is_told = self._memory_limit_bytes, self._task.config.memory_limit_bytes is not None
        if limit is None or is_told or self._world.size == 1:
            return limit
        if current is None or num_frozen < current.num_frozen:
            return limit
        return min(limit, max(limit - self._rows.bytes_on_device, *current.plan.peak_bytes))

    def _schedules(self) -> tuple[str, ...]:
        """Return the schedules that the run may have, the preferred one first."""
        config = self._task.config
        if config.weight_versions is not None:
            return ("1f1b",)  # Asynchronous; see `AsynchronousStage`.
        return (config.schedule,) if config.schedule else PlanRequest.schedules

    def _micro_batches(self, num_frozen: int) -> tuple[int, ...] | None:
        """Return the counts to consider; without flushes each stage's turns must come out even."""
        config, lengths = self._task.config, self._lengths(num_frozen)
        if config.micro_batches is not None:
            return (config.micro_batches,)
        if config.weight_versions is None or self._world.stage_workers is None:
            return None
        assert lengths is not None, "workers say how many stages there are"
        turn = self._world.topology(lengths[0]).common_turn
        if turn == 1:
            return None
        return tuple(range(turn, max(turn, 6 * self._world.size) + 1, turn))

    def _reads_a_row(self, clock: Clock, current: Decision | None) -> float:
        """Return how often a sample comes again in the run, after it was computed and stored."""
        if current is not None and current.use_cache:
            return math.inf  # Rows that are stored already serve deeper prefixes, too.
        fill_steps = clock.steps_per_epoch * (self._task.config.cache_views or 1)
        return max(0.0, (clock.max_steps - clock.step) / fill_steps - 1)

    def _lengths(self, num_frozen: int) -> tuple[int, ...] | None:
        """Return the length that was set, or the longest below it that the active layers allow."""
        length, workers = self._task.config.pipeline_length, self._world.stage_workers
        if self._task.config.plan in PIPEDREAM_PLANS and workers is None:
            return (1,)
        if length is None and workers is None:
            return None
        model = self._task.model
        most = len(model.sublayers) - model.first_active(num_frozen)
        most = min(most, length or len(workers or ()))
        return (max(one for one in self._world.lengths if one <= most),)

    def _check(self, plan: PipelinePlan, situation: PlanSituation) -> None:
        """Refuse what a user's planner may not return."""
        config, num_frozen = self._task.config, situation.request.num_frozen
        first = self._task.model.first_active(num_frozen)
        if plan.boundaries[0] != first:
            raise ValueError(
                f"the planner's first boundary is {plan.boundaries[0]}, but with {num_frozen} "
                f"frozen layers the first active sublayer is {first}; plan the active ones"
            )
        request = of_length(situation, plan.length)
        if plan.schedule not in (allowed := request.schedules_of(plan.length)):
            raise ValueError(
                f"the planner wants the schedule {plan.schedule!r}, but this run's are "
                f"{', '.join(map(repr, allowed))}: let it return one of them, or leave out "
                "schedule=, weight_versions= and stage_workers="
            )
        if plan.recomputes not in config.recompute:
            raise ValueError(
                f"the planner's plan has recomputes={plan.recomputes}, but "
                f"activation_checkpointing is {config.activation_checkpointing}; let it return "
                "the other, or set activation_checkpointing='auto'"
            )
        if config.micro_batch_size is None:
            return
        sizes = request.sizes_of(plan.length, plan.num_micro_batches)
        if plan.num_micro_batches != len(sizes):
            raise ValueError(
                f"the planner wants {plan.num_micro_batches} micro-batches, but micro_batch_size "
                f"{config.micro_batch_size} makes {len(sizes)} of a replica's samples; let it "
                "return as many, or leave micro_batch_size out"
            )

"""Train a layered model elastically: the loop that everything else serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from autodp import EpochSampler, broadcast_json, gather_json
from autopipe import Span, Trace
from freeze import Never, as_policy
from pipetransformer.adapters import LayeredModel, LossFunction, adapt
from pipetransformer.checks import check_world, choose_loss, refuse_batch_norm
from pipetransformer.config import make_config
from pipetransformer.controller import Clock, Controller
from pipetransformer.data import SizedDataset, check_dataset
from pipetransformer.deployment import Decision, Deployment
from pipetransformer.frozen_prefix import FrozenPrefix
from pipetransformer.layer_work import LossSums
from pipetransformer.measure import MEASURE_GUESS_S, Measurements, measure
from pipetransformer.optimizer_state import OptimizerFactory, adamw, peak_learning_rate
from pipetransformer.resume import resumes
from pipetransformer.run_log import Cost, RunLog
from pipetransformer.run_state import FitReport, RunState
from pipetransformer.stage import StepResult
from pipetransformer.task import Task
from pipetransformer.timeline import Timeline
from pipetransformer.world import connect, slots_of_a_node, world_size


class Trainer:
    """Train a model on all processes that were started, elastically.

    Every process runs the same script. Rank 0's weights win at the start; a rank keeps only the
    layers it trains, the others become meta tensors; `fit` ends by gathering the weights into rank
    0's model.

    Args:
        model: a timm or transformers model that an adapter knows, an nn.Sequential, or a
            LayeredModel.
        train_set: has a length and items by index: (x, y), or a mapping of the model's entries.
        eval_set: evaluated after every epoch, or as set.
        loss_fn: (output, targets) -> a 0-dim mean over the samples, or (sum, count).
        optimizer: builds an optimizer over a list of (name, parameter); AdamW by default.
        freeze: a FreezePolicy or a function of a FreezeContext; None freezes nothing.
        settings: the fields of `TrainConfig`.
    Raises:
        TypeError, ValueError: before anything is started: an unknown setting, a model no adapter
            knows, a dataset without a length, an impossible pipeline length, a batch smaller than
            the replicas.
    """

    def __init__(
        self,
        model: nn.Module | LayeredModel,
        train_set: SizedDataset,
        *,
        eval_set: SizedDataset | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        freeze: Any = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(settings)
        layered = adapt(model)
        optimizer = optimizer or adamw()
        self._peak_learning_rate = peak_learning_rate(optimizer, layered.model)
        self._task = Task(
            layered,
            choose_loss(layered, loss_fn),
            optimizer,
            self.config,
            frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad),
        )
        check_dataset(train_set, "train_set")
        if eval_set is not None:
            check_dataset(eval_set, "eval_set")
        check_world(self.config, world_size(), slots_of_a_node())
        self._resumes = resumes(self.config)
        refuse_batch_norm(layered.model)
        self._policy = as_policy(freeze)
        self._train_set, self._eval_set = train_set, eval_set
        self._sampler = EpochSampler(len(train_set), seed=self.config.seed)
        self._folder = None if self.config.folder is None else Path(self.config.folder)
        self.world = connect(self.config.device, timeout_s=self.config.setup_timeout_s)
        self._prefix = FrozenPrefix(self._task, self.world, train_set)
        self._deployment = Deployment(self._task, self.world, self._prefix)
        self._timeline = Timeline(self.config, len(train_set))
        self.report = FitReport()
        self._controller: Controller | None = None
        self._state = RunState(
            self._task,
            self.world,
            timeline=self._timeline,
            deployment=self._deployment,
            report=self.report,
        )
        self._trace: Trace | None = None
        self.measurements: Measurements | None = None
        self._measure_s = MEASURE_GUESS_S
        self._log = RunLog(
            self.world,
            self._folder if self.world.is_main else None,
            shown=self.config.progress and self.world.is_main,
            label=self.config.label,
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        # Leaving the groups after an error would end the other ranks' waits, and whoever watches
        # would blame them: only this process's own things are put in order.
        if error_type is None:
            self.close()
        else:
            self._state.close(failed=True)
            self._close_own()

    def close(self) -> None:
        """Wait for a checkpoint, destroy groups, unmap the cache and close the records.

        Rank 0's model stays usable.
        """
        try:
            self._state.close(failed=False)
        finally:
            self._deployment.close()
            self._close_own()
            self.world.close()

    def _close_own(self) -> None:
        self._prefix.close()
        if self._controller is not None:
            self._controller.close()
        self._log.close()

    def fit(self) -> FitReport:
        """Train to the end, and gather the weights into rank 0's model.

        Returns:
            what the run took and reached.
        """
        self._set_up()
        while not self._timeline.is_over:
            self.step()
            if self._timeline.at_epoch_start:
                self._end_epoch()
            assert self._controller is not None
            self._state.save_if_due(self._controller, self._log)
        self._state.finish(self._log)
        self._deployment.gather_weights()
        return self.report

    def step(self) -> StepResult:
        """Train on the next global batch, deciding first where a decision is due.

        Raises:
            RuntimeError: the run is over.
        """
        self._set_up()
        timeline = self._timeline
        if timeline.is_over:
            raise RuntimeError(
                f"all {self.config.epochs} epochs are done; give a larger epochs= to go on"
            )
        assert self.decision is not None
        if timeline.decision_due(self.decision.step):
            self._decide()
        position = timeline.position
        ids = self._sampler.global_batch(
            position.epoch, position.sample, timeline.global_batch(self._replicas)
        )
        stage = self._deployment.active_stage
        stage.recorder = (
            None
            if self._trace is None
            else self._trace.recorder(stage.index, device=self.world.device)
        )
        result = stage.train_step(
            ids,
            self._prefix.rows(position.epoch),
            step=position.step,
            epoch=position.epoch,
            learning_rate_factor=timeline.learning_rate_factor(self._replicas),
        )
        self._note_step(result, len(ids))
        timeline.advance(len(ids))
        return result

    def trace_step(self) -> Trace:
        """Train on the next global batch, as `step` does, and take down what ran when. Collective.

        Returns:
            what the first pipeline's stages did, on every rank.
        """
        self._trace = Trace()
        try:
            self.step()
            topology = self._deployment.active_stage.topology
            is_first = topology.replica_of(self.world.rank) == 0
            spans = [span.to_json() for span in self._trace.spans] if is_first else []
        finally:
            self._trace = None
        gathered = gather_json(spans, group=self.world.group)
        return Trace.of(Span.from_json(span) for spans in gathered for span in spans)

    def evaluate(self, dataset: SizedDataset | None = None) -> dict[str, float]:
        """Return the loss and the metrics over a dataset (the eval_set by default). Collective.

        Raises:
            ValueError: there is no dataset to evaluate.
        """
        dataset = self._eval_set if dataset is None else dataset
        if dataset is None:
            raise ValueError("there is no eval_set; give one to Trainer, or a dataset to evaluate")
        check_dataset(dataset, "dataset")
        self._set_up()
        sums = LossSums()
        self._deployment.active_stage.evaluate(
            len(dataset), lambda ids: self._prefix.read(dataset, ids, 0), sums
        )
        gathered: dict[str, list[float]] = {}
        for one in gather_json(sums.totals, group=self.world.group):
            for name, (total, count) in one.items():
                entry = gathered.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return {name: total / max(count, 1.0) for name, (total, count) in gathered.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state under its own names on rank 0, {} elsewhere. Collective."""
        self._set_up()
        self._deployment.gather_weights()
        return dict(self._task.model.model.state_dict()) if self.world.is_main else {}

    def save_model(self, path: str | Path) -> None:
        """Write the weights as one safetensors file under the model's own names. Collective."""
        state = self.state_dict()
        if self.world.is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(
                {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}, path
            )

    def measure(self) -> Measurements:
        """Measure sublayers, optimizer and links anew, for the decisions to come. Collective."""
        self._set_up()
        assert self._controller is not None
        self.measurements = self._controller.measurements = self._measure()
        return self.measurements

    @property
    def decision(self) -> Decision | None:
        """Return what holds now: frozen layers and pipeline; None before the first step."""
        return self._controller.current if self._controller is not None else None

    def _measure(self) -> Measurements:
        start = time.perf_counter()
        measurements = measure(
            self._task,
            self.world,
            lambda ids: self._prefix.read(self._train_set, ids % len(self._train_set), 0),
            held_bytes=self._deployment.held_bytes(),
        )
        self._measure_s = time.perf_counter() - start
        return measurements

    def _set_up(self) -> None:
        """Measure, restore or prepare, once."""
        if self._controller is not None:
            return
        if self.config.cache and not isinstance(self._policy, Never):
            self._prefix.check_repeatable()
        checkpoint = self._state.open(resumes=self._resumes)
        kept = self._state.kept_measurements(checkpoint) if checkpoint else None
        self.measurements = kept or self._measure()
        self._controller = Controller(self._task, self.world, self._policy, self.measurements)
        if checkpoint:
            self._state.restore(checkpoint, self._controller, self._log, self._clock)
        step = self._timeline.position.step
        self._controller.open_journal(self._folder, from_step=step if self._resumes else None)
        self._log.start(self._timeline.max_steps(self._replicas), self.measurements.profile)
        if self.decision is None:
            self._decide()

    def _decide(self) -> None:
        """Take a decision and carry it out."""
        assert self._controller is not None
        start = time.perf_counter()
        before = self._controller.current
        stage = self._deployment.stage
        measured_anew = before is not None and self._measure_if_drifted()
        decides = time.perf_counter()
        decision = self._controller.decide(
            self._clock(), stage.signals if stage else None, self.report.metrics
        )
        predicted_s = self._controller.predict_transition_s(decision.plan)
        changed = decision.changes(before)
        # The transition ends when its last rank is done.
        moved = sum(
            gather_json(self._deployment.change(decision), group=self.world.group)
            if changed
            else []
        )
        ends = time.perf_counter()
        seconds = ends - decides
        self._controller.executed(decision, seconds if changed else None)
        if before is not None:
            self.report.seconds += ends - start
        if changed:
            cost = Cost(seconds, predicted_s, moved)
            entry = self._log.transition(before, decision, cost)
            if before is not None:
                self.report.transitions.append(entry)
        if changed or measured_anew:
            self._log.pace.begin(decision.plan.predicted_step_s, measured_anew=measured_anew)

    def _measure_if_drifted(self) -> bool:
        """Measure anew where steps no longer take what they took. Collective."""
        remaining = self._timeline.max_steps(self._replicas) - self._timeline.position.step
        pays = self._log.pace.pays(remaining_steps=remaining, cost_s=self._measure_s)
        if not broadcast_json(pays, group=self.world.group):
            return False
        self.measure()
        self._log.measurement(self._timeline.position.step, self._measure_s)
        return True

    @property
    def _replicas(self) -> int:
        stage = self._deployment.stage
        return stage.topology.replicas if stage else 1

    def _clock(self) -> Clock:
        """Describe the coming step to a policy."""
        peak = self._peak_learning_rate
        timeline, replicas = self._timeline, self._replicas
        return Clock(
            timeline.position.step,
            timeline.position.epoch,
            timeline.max_steps(replicas),
            timeline.steps_per_epoch(replicas),
            peak * timeline.learning_rate_factor(replicas),
            peak,
        )

    def _note_step(self, result: StepResult, num_samples: int) -> None:
        assert self.decision is not None and self.measurements is not None
        stats = self._prefix.take_stats()
        self.report.add_step(result, stats, num_samples)
        self._log.step(
            result,
            stats,
            self.decision,
            {
                "step": self._timeline.position.step,
                "epoch": self._timeline.position.epoch,
                "samples": num_samples,
                "learning_rate": self._clock().learning_rate,
                "max_steps": self._timeline.max_steps(self._replicas),
            },
        )

    def _end_epoch(self) -> None:
        """Record and evaluate after an epoch."""
        config, position = self.config, self._timeline.position
        self._log.epoch(position.step, position.epoch)
        every = config.evaluate_every_epochs
        if (
            self._eval_set is not None
            and every
            and (position.epoch % every == 0 or position.epoch == config.epochs)
        ):
            start = time.perf_counter()
            self.report.metrics = self.evaluate()
            self._log.evaluation(
                position.step, position.epoch, self.report.metrics, time.perf_counter() - start
            )

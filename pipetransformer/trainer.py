"""Train a layered model elastically: the loop that everything else serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from autodp import EpochSampler, gather_json
from autopipe.trace import Span, Trace
from freeze import NeverFreeze, as_policy
from pipetransformer.adapters import LayeredModel, adapt
from pipetransformer.checkpoint import RunState, Saved, resumes
from pipetransformer.config import make_config
from pipetransformer.data import Batch, SizedDataset, check_dataset, own_random_numbers
from pipetransformer.job import Task
from pipetransformer.loss import LossFunction, choose_loss
from pipetransformer.measure import Measurements
from pipetransformer.optimizer import OptimizerFactory, adamw, try_optimizer
from pipetransformer.processes import agree, connect, likely_device, slots_of_a_node, world_size
from pipetransformer.refusals import (
    check_world,
    probe_sublayers,
    refuse_model,
    refuse_surroundings,
)
from pipetransformer.report import FitReport, RunLog
from pipetransformer.run_position import Timeline
from pipetransformer.stage import FrozenPrefix, LossSums, SampleFeed, StepResult
from pipetransformer.transition import Change, Decision, Deployment, Transitions
from pipetransformer.verification import Verification, verify


class Trainer:
    """Train a model on all processes that were started, elastically.

    Every process runs the same script. Rank 0's weights win at the start; a rank keeps only the
    layers it trains, the others become meta tensors; `fit` ends by gathering the weights into rank
    0's model.

    Args:
        model: a timm or transformers model that an adapter knows, an nn.Sequential, or a
            LayeredModel.
        train_dataset: has a length and items by index: (x, y), or a mapping of entries.
        eval_dataset: evaluated after every epoch, or as set.
        loss_fn: (output, targets) -> a 0-dim mean over the samples, or (sum, count).
        optimizer: builds an optimizer over a list of (name, parameter); AdamW by default.
        freeze: a FreezePolicy or a function of a FreezeContext; None freezes nothing.
        settings: the fields of `TrainConfig`.
    Raises:
        TypeError, ValueError: before anything is started: an unknown setting, a model no adapter
            knows, a dataset without a length, an impossible pipeline length, a batch smaller than
            the replicas, a folder that holds another run.
    """

    def __init__(
        self,
        model: nn.Module | LayeredModel,
        train_dataset: SizedDataset,
        *,
        eval_dataset: SizedDataset | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        freeze: Any = None,
        **settings: Any,
    ) -> None:
        self.config = make_config(settings)
        layered = adapt(model)
        refuse_model(layered)
        optimizer = optimizer or adamw()
        traits = try_optimizer(optimizer, layered.model, likely_device(self.config.device))
        self._task = Task(
            layered,
            choose_loss(loss_fn, layered.loss_fn, model=type(layered.model).__name__),
            optimizer,
            self.config,
            frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad),
        )
        check_dataset(train_dataset, "train_dataset")
        if eval_dataset is not None:
            check_dataset(eval_dataset, "eval_dataset")
        check_world(self.config, world_size(), slots_of_a_node())
        resumes(self.config)  # Refuses a folder before anything is started.
        self._policy = as_policy(freeze)
        self._caches = self.config.cache and not isinstance(self._policy, NeverFreeze)
        self._own_loss = loss_fn
        self._train_dataset, self._eval_dataset = train_dataset, eval_dataset
        self._sampler = EpochSampler(len(train_dataset), seed=self.config.seed)
        self.world = connect(self.config.device, timeout_s=self.config.setup_timeout_s)
        self._prefix = FrozenPrefix(self._task, self.world.device)
        self._feed = self._feed_of(train_dataset)
        self._evaluation_feed = None if eval_dataset is None else self._feed_of(eval_dataset)
        self._deployment = Deployment(self._task, self.world, self._feed)
        self._timeline = Timeline(self.config, len(train_dataset))
        self.report = FitReport()
        self._log = RunLog(self.world, self.config)
        self._transitions = Transitions(
            self._task,
            self.world,
            deployment=self._deployment,
            timeline=self._timeline,
            read=self._read_train_dataset,
            peak_learning_rate=traits.peak_learning_rate,
        )
        self._state = RunState(
            self._task,
            self.world,
            timeline=self._timeline,
            deployment=self._deployment,
            parts={"transitions": self._transitions, "report": self.report, "log": self._log},
            optimizer=traits,
        )
        self._trace: Trace | None = None

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
        """Wait for a checkpoint, and let go of all but rank 0's model, which stays usable."""
        try:
            self._state.close(failed=False)
        finally:
            self._deployment.close()
            self._close_own()
            self.world.close()

    def _close_own(self) -> None:
        for feed in filter(None, (self._feed, self._evaluation_feed)):
            feed.close()
        self._transitions.close()
        self._log.close()

    def fit(self) -> FitReport:
        """Train to the end, and gather the weights into rank 0's model.

        Those that do not fit on its device go into host memory, with a warning.

        Returns:
            what the run took and reached.
        """
        refuse_surroundings(trains=True)
        self._set_up()
        while not self.is_over:
            self.step()
        self._note_saved(self._state.finish())
        self._deployment.gather_weights(self._deployment.roomy_device())
        return self.report

    def step(self) -> StepResult:
        """Train on the next global batch; decide before it, evaluate and save after it, where due.

        Returns:
            the loss and more of the training step alone.
        Raises:
            RuntimeError: the run is over.
            ValueError: before the first step: another run trains in the folder, or what it holds
                cannot be continued.
        """
        with own_random_numbers(self.world.device):
            return self._step()

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
        """Return loss and metrics over a dataset, the eval_dataset by default. Collective.

        Raises:
            ValueError: there is no dataset to evaluate.
        """
        dataset = self._eval_dataset if dataset is None else dataset
        if dataset is None:
            raise ValueError(
                "there is no eval_dataset; give one to Trainer, or a dataset to evaluate"
            )
        check_dataset(dataset, "dataset")
        sums = LossSums()
        with own_random_numbers(self.world.device):
            self._set_up()
            own = self._evaluation_feed
            feed = own if own and own.dataset is dataset else self._feed_of(dataset, once=True)
            feed.follow_prefix()
            rows = feed.rows(0, is_last=self.is_over or feed is not own)
            self._deployment.active_stage.evaluate(len(dataset), rows, sums)
            if feed is not own:
                feed.close()
        return LossSums.joined(gather_json(sums.totals, group=self.world.group)).means()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's state under its own names on rank 0, {} elsewhere. Collective.

        Until the run is over these are copies in host memory, as training goes on with its own.
        """
        self._set_up()
        deployment = self._deployment
        if not self.is_over:
            return deployment.copy_weights()
        deployment.gather_weights(deployment.roomy_device())
        return dict(self._task.model.model.state_dict()) if self.world.is_main else {}

    def save_model(self, path: str | Path) -> None:
        """Write the weights as one safetensors file under the model's own names. Collective."""
        state = self.state_dict()
        if self.world.is_main:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(
                {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}, path
            )

    def verify(self, batch: Batch | None = None) -> Verification:
        """Compare what is trained with the model's own forward and a plain loop. Collective.

        On a few samples, without dropout and in float64 where the model computes in it: outputs,
        loss, gradients and updated weights, in pipelines over all processes. Twins of the model
        are trained; this run is as it was. Each rank has room for two of them in host memory.

        Args:
            batch: entries by name, (N, ...) each with N >= 2; None takes the first of the
                training set.
        Raises:
            VerificationError: on every rank: they differ; the message names the first sublayer,
                parameter or buffer.
            ValueError: the batch has fewer than two samples.
        """
        refuse_surroundings(trains=True)
        with self._deployment.whole_on_rank_0(), own_random_numbers(self.world.device):
            if batch is None:
                batch = self._read_train_dataset(torch.arange(2 * max(2, self.world.size)))
            return verify(
                self._task, self.world, model=self._task.model, loss_fn=self._own_loss, batch=batch
            )

    def measure(self) -> Measurements:
        """Measure sublayers, optimizer and links anew, for the decisions to come. Collective."""
        self._set_up()
        return self._transitions.measure()

    @property
    def is_main_process(self) -> bool:
        """Tell whether this process is rank 0, which decides, records and saves."""
        return self.world.is_main

    @property
    def global_step(self) -> int:
        """Return how many steps are done."""
        return self._timeline.position.step

    @property
    def max_steps(self) -> int:
        """Return how many steps the whole run has, if the global batch stays what it is."""
        return self._timeline.max_steps(self._transitions.replicas)

    @property
    def is_over(self) -> bool:
        """Tell whether all epochs are done."""
        return self._timeline.is_over

    @property
    def measurements(self) -> Measurements | None:
        """Return what decisions are based on; None before the first step."""
        transitions = self._transitions
        return transitions.decider.measurements if transitions.have_begun else None

    @property
    def decision(self) -> Decision | None:
        """Return what holds now: frozen layers and pipeline; None before the first step."""
        return self._transitions.decider.current if self._transitions.have_begun else None

    def _read_train_dataset(self, ids: Tensor) -> Batch:
        """Read samples to measure and to probe with; ids may exceed the training set's length."""
        return self._feed.read(ids)

    def _feed_of(self, dataset: SizedDataset, *, once: bool = False) -> SampleFeed:
        return SampleFeed(self._task, self.world, dataset, self._prefix, once=once)

    def _step(self) -> StepResult:
        refuse_surroundings(trains=True)
        self._set_up()
        timeline = self._timeline
        if timeline.is_over:
            raise RuntimeError(
                f"all {self.config.epochs} epochs are done; give a larger epochs= to go on"
            )
        self._note_change(self._transitions.decide_if_due(self.report.metrics))
        position = timeline.position
        ids = self._sampler.global_batch(
            position.epoch, position.sample, timeline.global_batch(self._transitions.replicas)
        )
        stage = self._deployment.active_stage
        if self._trace is not None:
            stage.recorder = self._trace.recorder(stage.index, device=self.world.device)
        result = stage.train_step(
            ids,
            self._feed.rows(position.epoch, is_last=timeline.sees_samples_last),
            step=position.step,
            next_ids=self._next_ids(len(ids)),
            learning_rate_factor=timeline.learning_rate_factor(self._transitions.replicas),
        )
        stage.recorder = None
        self._note_step(result, len(ids))
        timeline.advance(len(ids))
        if timeline.at_epoch_start:
            self._end_epoch()
        self._note_saved(self._state.save_if_due(self._transitions.decider))
        return result

    def _next_ids(self, num_done: int) -> Tensor | None:
        """Return the coming step's samples, where no decision and no new epoch comes before."""
        timeline, position = self._timeline, self._timeline.position
        sample = position.sample + num_done
        if sample >= len(self._train_dataset) or timeline.decision_follows():
            return None
        size = timeline.global_batch(self._transitions.replicas)
        return self._sampler.global_batch(position.epoch, sample, size)

    def _set_up(self) -> None:
        """Measure, restore or prepare, once."""
        refuse_surroundings(trains=False)
        if self._transitions.have_begun:
            return
        if self._caches:
            self._feed.check_repeatable()
        checkpoint = self._state.open()
        agree(self._log.open, group=self.world.group)
        probe_sublayers(self._task, self.world, self._read_train_dataset)
        kept = self._state.kept_measurements(checkpoint) if checkpoint else None
        self._transitions.begin(self._policy, kept)
        decider = self._transitions.decider
        if checkpoint:
            self._state.restore(checkpoint, self._transitions)
        decider.open_journal(from_step=self.global_step if self._state.resumes else None)
        profile = decider.measurements.profile
        cache_bytes = self._feed.most_bytes(profile) if self._caches else 0
        self._log.start(self._transitions.clock(), profile, cache_bytes)
        if self.decision is None:
            self._note_change(self._transitions.decide_if_due(self.report.metrics))

    def _note_change(self, change: Change | None) -> None:
        if change is not None:
            self.report.add_change(change, self._log.change(change))

    def _note_saved(self, saved: Saved | None) -> None:
        if saved is not None and saved.num_bytes:
            self._log.checkpoint(saved)

    def _note_step(self, result: StepResult, num_samples: int) -> None:
        assert self.decision is not None
        stats = self._feed.take_stats()
        self.report.add_step(result, stats, num_samples)
        clock, decision = self._transitions.clock(), self.decision
        self._log.step(result, stats, decision=decision, clock=clock, num_samples=num_samples)
        usual_s = self._transitions.note_step(result)
        if usual_s is not None:
            self._log.outcome(clock.step, decision, usual_s)

    def _end_epoch(self) -> None:
        """Record and evaluate after an epoch."""
        position = self._timeline.position
        self._log.epoch(position.step, position.epoch)
        if self._eval_dataset is not None and self._timeline.evaluation_due():
            start = time.perf_counter()
            self.report.metrics = self.evaluate()
            self._log.evaluation(
                position.step, position.epoch, self.report.metrics, time.perf_counter() - start
            )

"""Put a run's parts together, begin with them, and put them away.

task: what is trained                 feed: whose samples, through the cache
world: on which ranks                 deployment: what this rank holds of it
timeline: where the run is            transitions: what is decided, and carried out
evaluator: loss, metrics, outputs     selection: the best evaluation, and its weights
state: what checkpoints hold          log: records, progress and the report
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autodp import gather_json
from autopipe.trace import Span, Trace
from freeze import (
    FreezePolicy,
    NeverFreeze,
    PolicyFunction,
    as_policy,
    checked_scale,
    named_policy,
    sets_rates,
)
from pipetransformer.adapters import LayeredModel, adapt
from pipetransformer.checkpoint import Part, RunState, resumes
from pipetransformer.config import TrainConfig, make_config
from pipetransformer.data import Batch, SizedDataset, check_dataset
from pipetransformer.evaluator import Evaluator
from pipetransformer.feed import FrozenPrefix, SampleFeed, samples_of
from pipetransformer.job import Task, set_frozen
from pipetransformer.lent_model import LentModel
from pipetransformer.loss import LossFunction, choose_loss, smooth_labels
from pipetransformer.measure import largest_micro_batch
from pipetransformer.model_files import DescribedModel
from pipetransformer.optimizer import (
    OptimizerFactory,
    OptimizerTraits,
    adamw,
    decay_by_layer,
    split_by_layer,
    try_optimizer,
)
from pipetransformer.position import Clock, ComingBatches, ComingStep, Timeline
from pipetransformer.precision import DTYPES
from pipetransformer.processes import (
    World,
    agree,
    connect,
    give_back_freed_memory,
    keep_freed_memory,
    likely_device,
    slots_of_a_node,
    world_size,
)
from pipetransformer.refusals import (
    check_selection,
    check_world,
    probe_evaluation,
    probe_sublayers,
    refuse_captured,
    refuse_differing_ranks,
    refuse_model,
    warn_of_full_float32,
    warn_of_large_batch,
    warn_of_low_weights,
)
from pipetransformer.report import RunLog
from pipetransformer.selection import Selection
from pipetransformer.stage import StepResult
from pipetransformer.transition import Change, Decision, Deployment, Transitions
from pipetransformer.unflushed import UnflushedStage
from pipetransformer.verification import Verification, verify


class Run:
    """Hold the parts of a run; the Trainer leads them from step to step.

    Args and errors are the Trainer's. What can be refused without the other processes is refused
    before they meet.
    """

    def __init__(
        self,
        model: nn.Module | LayeredModel,
        train_dataset: SizedDataset,
        *,
        eval_dataset: SizedDataset | None,
        loss_fn: LossFunction | None,
        optimizer: OptimizerFactory | None,
        freeze: FreezePolicy | PolicyFunction | str | None,
        **settings: Any,
    ) -> None:
        policy = named_policy(freeze) if isinstance(freeze, str) else as_policy(freeze)
        config, layered = make_config(settings), adapt(model)
        self.task, traits = _describe(layered, loss_fn, optimizer, config, policy)
        task, self._optimizer_settings = self.task, traits.settings
        # The loss that the model itself returns is not smoothed.
        self.given_loss_fn = task.loss_fn if config.label_smoothing else loss_fn
        _check(config, train_dataset, eval_dataset)
        self._lent = LentModel(task)
        self._stream, self._untold = deque[StepResult](), deque[Callable[[], None]]()
        self._last_rate: float | None = None
        self._caches = config.cache and not isinstance(policy, NeverFreeze)
        self.timeline = Timeline(
            config, len(train_dataset), traits.peak_learning_rate, _rates_of(policy, layered)
        )
        self._coming = ComingBatches(task, train_dataset, self.timeline)

        self.world = world = _join_world(config)
        prefix = FrozenPrefix(task)
        self.feed = SampleFeed(
            prefix,
            world,
            samples_of(task, train_dataset),
            to_come=self._own_to_come,
            keeps=config.cache_views or 1,
        )
        self.deployment = Deployment(task, world, self.feed)
        self.evaluator = Evaluator(
            task,
            world,
            prefix,
            deployment=self.deployment,
            timeline=self.timeline,
            dataset=eval_dataset,
        )
        self.transitions = Transitions(
            task, world, policy=policy, deployment=self.deployment, timeline=self.timeline
        )
        self.log = RunLog(world, config, freezes=not isinstance(policy, NeverFreeze))
        self.selection = Selection(
            config,
            world,
            deployment=self.deployment,
            timeline=self.timeline,
            report=self.log.report,
        )
        parts = self._saved_parts()
        self.state = RunState(
            task, world, transitions=self.transitions, parts=parts, optimizer=traits
        )

    def begin(self, *, trains: bool = False) -> Change | None:
        """Restore or prepare, measure, and decide, once; return what that changed. Collective.

        Args:
            trains: whether steps follow, and with them evaluations, and not a prediction alone.
        """
        if self.transitions.have_begun:
            return None
        self._lent.borrow()
        try:
            self.deployment.fill_released()
            checkpoint = self.state.open()
            self._refuse_what_runs_wrongly(trains)
            self.state.begin(checkpoint)
            self.log.say(self.state.continues)
            self.selection.take_up()
            self._start_log()
            return self.decide_if_due()
        except BaseException:
            self._lent.give_back()
            raise

    def borrow_model(self) -> None:
        """Have the model as the last decision wants it, where it was given back since."""
        if self._lent.borrow() and (decision := self.transitions.decision) is not None:
            set_frozen(self.task, decision.num_frozen, decision.resting)

    def give_model_back(self) -> None:
        """Leave the user's model as it came, but for its weights; see `LentModel`."""
        if self.timeline.is_over and self.deployment.stage is not None:
            self.deployment.stage.end_training()
        self._lent.give_back()

    def decide_if_due(self) -> Change | None:
        """Decide where a decision precedes the coming step, and carry it out.

        Collective there, and at an epoch's start.
        """
        if self.timeline.at_epoch_start:
            self.deployment.refuse_partial_edits()
        report = self.log.report
        change = self.transitions.decide_if_due(report.metrics, report.evaluated_at)
        if change is not None:
            self.log.change(change)
        return change

    def evaluate_if_due(self) -> dict[str, float] | None:
        """Evaluate, record that and take it into account, where that follows the last step.

        Collective there.
        """
        dataset = self.evaluator.dataset
        if dataset is None or not self.timeline.evaluation_due():
            return None
        position, start = self.timeline.position, time.perf_counter()
        metrics = self.evaluator.evaluate(dataset)
        seconds = time.perf_counter() - start
        self.log.evaluation(position.step, position.epoch, metrics, seconds)
        self.selection.judge(metrics)
        return metrics

    def note_step(self, result: StepResult, clock: Clock, num_samples: int) -> None:
        """Go on to the next step, and record what this one tells. Collective after an epoch.

        What a GPU is still to compute is recorded a step late, or before whatever comes between
        two steps.
        """
        decision, timeline = self.transitions.decider.current, self.timeline
        assert decision is not None
        self._last_rate = clock.learning_rate
        report = self.log.report
        report.cache_bytes = max(report.cache_bytes, self.feed.cache_bytes)
        told = partial(self._record_step, result, decision, clock, num_samples)
        self._untold.append(told)
        self._record_steps(but_last=not result.is_known)
        timeline.advance(num_samples)
        if result.stops:
            timeline.stop()
        if timeline.pauses or timeline.position.step == self.transitions.review_step:
            self.settle()
        if timeline.at_epoch_start:
            self.log.epoch(timeline.position.step, timeline.position.epoch)

    def settle(self) -> None:
        """Wait for the last step, where it was not waited for, and record it.

        Raises:
            NonFiniteError: it came to a number that is not finite.
        """
        if self.deployment.stage is not None:
            self.deployment.stage.settle()
        self._record_steps(but_last=False)

    def _record_steps(self, *, but_last: bool) -> None:
        while len(self._untold) > but_last:
            self._untold.popleft()()

    def _record_step(
        self, result: StepResult, decision: Decision, clock: Clock, num_samples: int
    ) -> None:
        self.log.step(result, decision=decision, clock=clock, num_samples=num_samples)
        usual_s = self.transitions.note_step(result, clock.learning_rate)
        if usual_s is not None:
            self.log.outcome(clock.step, decision, usual_s)

    def note_end(self) -> None:
        """Record the epoch in which the run is over, if it ended within one. Collective there.

        The progress ends there, too.
        """
        timeline = self.timeline
        if timeline.is_over and not timeline.at_epoch_start:
            position = timeline.position
            self.log.epoch(position.step, position.epoch + 1, partial=True)
        if timeline.is_over:
            self.log.finish()

    def where_it_stopped(self) -> str:
        """Say at which step a run was left, and how it goes on; on other ranks "".

        The save under way is given a moment, on all ranks.
        """
        newest, config = self.state.newest_checkpoint(), self.task.config
        if not self.world.is_main:
            return ""
        stopped = f"stopped at step {self.timeline.position.step}"
        if newest is not None:
            return (
                f"{stopped}; the newest checkpoint is {newest}: continue it with resume='auto', "
                "or with train(resume_from_checkpoint=True) of pipetransformer.hf"
            )
        if config.folder is not None and config.saves:
            return f"{stopped}, before the first checkpoint; resume='auto' starts the run anew"
        return (
            f"{stopped}; there is no checkpoint: a run that is to be continued needs folder= and "
            "checkpoint_every_steps= or checkpoint_every_epochs="
        )

    @property
    def learning_rate(self) -> float:
        """Return the last step's, or before any the first one's."""
        last = self._last_rate
        return self.transitions.clock().learning_rate if last is None else last

    def next_two(self) -> tuple[ComingStep, Tensor | None]:
        """Return the coming step, and the samples of the next where nothing comes between."""
        return self._coming.next_two(self.transitions.replicas)

    def train_in_stream(self, *, stops: bool) -> StepResult:
        """Return the coming step's result, of a stream that is trained to the next pause.

        Args:
            stops: whether this rank asks to end the run, which happens at a stream's end.
        """
        stage, timeline = self.deployment.active_stage, self.timeline
        assert isinstance(stage, UnflushedStage)
        if not self._stream:
            rows = self.feed.rows(timeline.position.epoch, is_last=timeline.sees_samples_last)
            replicas, review = self.transitions.replicas, self.transitions.review_step
            steps = self._coming.to_next_pause(replicas, review)
            self._stream = stage.train_stream(steps, rows)
            timeline.note_trained(steps[-1].step)
        result = self._stream.popleft()
        if self._stream:
            return result
        return replace(result, stops=any(gather_json(stops, group=self.world.group)))

    def _saved_parts(self) -> dict[str, Part]:
        """Return what saves itself into checkpoints, beside weights, moments and transitions."""
        scale = self.deployment.loss_scale
        parts: dict[str, Part] = {
            "report": self.log.report,
            "log": self.log,
            "best": self.selection.best,
            "coming": self._coming,
            "model": DescribedModel(self.task.model.model),
        }
        return {**parts, "loss_scale": scale} if scale.is_dynamic else parts

    def _own_to_come(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and this replica's samples of the coming step and of all after it."""
        for epoch, batch in self._coming.to_the_end(self.transitions.replicas):
            yield epoch, self.deployment.active_stage.share.read_of(batch)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what `Trainer.state_dict` does. Collective."""
        if not self.timeline.is_over:
            return self.deployment.copy_weights()
        self.deployment.gather_weights(self.deployment.roomy_device())
        return dict(self.task.model.model.state_dict()) if self.world.is_main else {}

    def verify(self, batch: Batch | None) -> Verification:
        """Verify on a batch, or on a few samples for every rank. Collective."""
        model, loss_fn = self.task.model, self.given_loss_fn
        with self.deployment.whole_on_rank_0():
            if batch is None:
                batch = self.feed.read(torch.arange(2 * max(2, self.world.size)))
            return verify(self.task, self.world, model=model, loss_fn=loss_fn, batch=batch)

    def joined_trace(self, own: Trace) -> Trace:
        """Return what the first pipeline's stages took down, on every rank. Collective.

        Of a stage of several workers it is the first one's.
        """
        speaks = self.deployment.active_stage.speaks_for_stage
        spans = [span.to_json() for span in own.spans] if speaks else []
        gathered = gather_json(spans, group=self.world.group)
        return Trace.of(Span.from_json(span) for spans in gathered for span in spans)

    def close(self, *, failed: bool) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model.

        Leaving the groups after an error would end the other ranks' waits, and whoever watches
        would blame them: then only this process's own things are put in order.
        """
        try:
            if not failed:
                self.settle()
            self.state.close(failed=failed)
        finally:
            if not failed:
                self.deployment.close()
            self._lent.give_back()
            self.feed.close()
            self.evaluator.close()
            self.transitions.close()
            self.log.close()
            if not failed:
                self.world.close()
            give_back_freed_memory()

    def _refuse_what_runs_wrongly(self, trains: bool) -> None:
        data, evaluated = {"train_dataset": self.feed.samples}, self.evaluator.feed
        if evaluated is not None:
            data["eval_dataset"] = evaluated.samples
        refuse_differing_ranks(
            self.task, self.world, optimizer=self._optimizer_settings, data=data
        )
        if self._caches:
            self.feed.look_for_randomness()
        self.feed.warn_of_padding()
        if self.world.is_main:
            warn_of_large_batch(self.task.config, self.timeline.num_samples)
            warn_of_low_weights(self.task.model.model)
            warn_of_full_float32(self.task.model.model, self.task.computes_in, self.world.device)
        self._coming.refuse_other_orders(self.world.group)
        agree(self.log.open, group=self.world.group)
        probe_sublayers(self.task, self.world, self.feed.read)
        config = self.task.config
        evaluates = bool(config.evaluate_every_epochs or config.evaluate_every_steps)
        if trains and evaluates and evaluated is not None:
            probe_evaluation(self.task, self.world, evaluated.read)

    def _start_log(self) -> None:
        profile = self.transitions.decider.planner.measurements.profile
        feeds = [f for f in (self.feed, self.evaluator.feed) if f is not None and f.may_cache]
        ids = torch.arange(largest_micro_batch(self.task, self.world))
        measured = self.feed.read_apart(ids) if self._caches else {}
        cache_bytes = sum(feed.most_bytes(profile, measured) for feed in feeds if self._caches)
        self.log.start(
            self.transitions.clock(),
            profile,
            cache_bytes=cache_bytes,
            unused=self.feed.unused_columns() if self.world.is_main else (),
        )


def _check(
    config: TrainConfig, train_dataset: SizedDataset, eval_dataset: SizedDataset | None
) -> None:
    """Refuse, before anything is started, what will not go together."""
    check_dataset(train_dataset, "train_dataset")
    if eval_dataset is not None:
        check_dataset(eval_dataset, "eval_dataset")
    check_selection(config, has_eval_dataset=eval_dataset is not None)
    check_world(config, world_size(), slots_of_a_node())
    resumes(config)  # Refuses a folder.


def _join_world(config: TrainConfig) -> World:
    """Meet the other processes, and set up this one's memory."""
    world = replace(
        connect(config.device, timeout_s=config.setup_timeout_s),
        max_replicas=config.most_replicas(),
        stage_workers=config.stage_workers and tuple(config.stage_workers),
    )
    if world.device.type == "cpu":
        keep_freed_memory()
    return world


def _describe(
    layered: LayeredModel,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    config: TrainConfig,
    policy: FreezePolicy,
) -> tuple[Task, OptimizerTraits]:
    """Return what is trained, and what its optimizer is like; refuse what cannot be."""
    refuse_model(layered, DTYPES[config.precision])
    policy.check(layered.num_layers)
    optimizer = optimizer or adamw()
    traits = try_optimizer(optimizer, layered.model, likely_device(config.device))
    if config.layer_decay is not None:
        optimizer = decay_by_layer(optimizer, layered, config.layer_decay)
    if sets_rates(policy, layered.num_layers):
        optimizer = split_by_layer(optimizer, layered)
    loss = choose_loss(loss_fn, layered.loss_fn, model=type(layered.model).__name__)
    task = Task(
        layered,
        smooth_labels(loss, config.label_smoothing),
        optimizer,
        config,
        frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad),
        # Every step needs the gradient's norm anyway.
        policy.signals | set(config.signals) | {"gradient_norm"},
    )
    if world_size() > 1:
        refuse_captured(task.loss_fn, layered.model)
    return task, traits


def _rates_of(
    policy: FreezePolicy, model: LayeredModel
) -> Callable[[int | None, float], float | None]:
    """Return a policy's learning rates by layer, None for the head, and share of the run."""
    top = model.num_layers
    return lambda layer, done: checked_scale(policy, top if layer is None else layer, top, done)

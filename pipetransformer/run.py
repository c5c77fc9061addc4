"""Put a run's parts together, begin with them, and put them away.

task: what is trained                 feed, evaluation_feed: whose samples, through the cache
world: on which ranks                 deployment: what this rank holds of it
timeline: where the run is            transitions: what is decided, and carried out
state: what checkpoints hold          log: records, progress and the report
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autodp import EpochSampler
from freeze import NeverFreeze, as_policy
from pipetransformer.adapters import LayeredModel, adapt
from pipetransformer.checkpoint import Part, RunState, resumes
from pipetransformer.config import TrainConfig, make_config
from pipetransformer.data import Batch, SizedDataset, check_dataset, read_lengths
from pipetransformer.feed import Coming, FrozenPrefix, SampleFeed
from pipetransformer.job import Task
from pipetransformer.loss import LossFunction, choose_loss, smooth_labels
from pipetransformer.optimizer import OptimizerFactory, adamw, decay_by_layer, try_optimizer
from pipetransformer.precision import Precision
from pipetransformer.processes import agree, connect, likely_device, slots_of_a_node, world_size
from pipetransformer.refusals import check_world, probe_sublayers, refuse_model
from pipetransformer.report import RunLog
from pipetransformer.run_position import Clock, Timeline
from pipetransformer.stage import StepResult
from pipetransformer.transition import Deployment, Transitions


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
        freeze: Any,
        **settings: Any,
    ) -> None:
        config, layered = make_config(settings), adapt(model)
        refuse_model(layered, Precision.named(config.precision))
        optimizer = optimizer or adamw()
        traits = try_optimizer(optimizer, layered.model, likely_device(config.device))
        if config.layer_decay is not None:
            optimizer = decay_by_layer(optimizer, layered, config.layer_decay)
        loss = choose_loss(loss_fn, layered.loss_fn, model=type(layered.model).__name__)
        self.task = task = Task(
            layered,
            smooth_labels(loss, config.label_smoothing),
            optimizer,
            config,
            frozenset(n for n, p in layered.model.named_parameters() if p.requires_grad),
        )
        # The loss that the model itself returns is not smoothed.
        self.given_loss_fn = task.loss_fn if config.label_smoothing else loss_fn
        check_dataset(train_dataset, "train_dataset")
        if eval_dataset is not None:
            check_dataset(eval_dataset, "eval_dataset")
        check_world(config, world_size(), slots_of_a_node())
        resumes(config)  # Refuses a folder before anything is started.
        policy = as_policy(freeze)
        self._caches = config.cache and not isinstance(policy, NeverFreeze)
        self._sampler = self._sampler_of(train_dataset, config)

        self.world = world = connect(config.device, timeout_s=config.setup_timeout_s)
        self._prefix = FrozenPrefix(task, world.device)
        self.feed = self._make_feed(train_dataset, self._to_come)
        self.evaluation_feed = None if eval_dataset is None else self.feed_of(eval_dataset)
        self.timeline = Timeline(config, len(train_dataset), traits.peak_learning_rate)
        self.deployment = Deployment(task, world, self.feed)
        self.transitions = Transitions(
            task,
            world,
            policy=policy,
            deployment=self.deployment,
            timeline=self.timeline,
            read=self.feed.read,
        )
        self.log = RunLog(world, config)
        parts: dict[str, Part] = {"report": self.log.report, "log": self.log}
        if self.deployment.loss_scale.is_dynamic:
            parts["loss_scale"] = self.deployment.loss_scale
        self.state = RunState(
            task,
            world,
            transitions=self.transitions,
            parts=parts,
            optimizer=traits,
        )

    def begin(self) -> None:
        """Restore or prepare, measure, and decide, once. Collective."""
        if self.transitions.have_begun:
            return
        checkpoint = self.state.open()
        self._refuse_what_runs_wrongly()
        self.state.begin(checkpoint)
        self._start_log()
        self.decide_if_due()

    def decide_if_due(self) -> None:
        """Decide where a decision precedes the coming step, and carry it out. Collective there."""
        change = self.transitions.decide_if_due(self.log.report.metrics)
        if change is not None:
            self.log.change(change)

    def note_step(self, result: StepResult, clock: Clock, num_samples: int) -> None:
        """Count a step in, and where it tells what the plan's steps take, record that."""
        decision = self.transitions.decider.current
        assert decision is not None
        stats = self.feed.take_stats()
        self.log.step(result, stats, decision=decision, clock=clock, num_samples=num_samples)
        usual_s = self.transitions.note_step(result)
        if usual_s is not None:
            self.log.outcome(clock.step, decision, usual_s)

    def batches(self) -> tuple[Tensor, Tensor | None]:
        """Return the samples of the coming step, and of the next where nothing comes between."""
        timeline, position = self.timeline, self.timeline.position
        size = timeline.global_batch(self.transitions.replicas)
        ids = self._sampler.global_batch(position.epoch, position.sample, size)
        sample = position.sample + len(ids)
        if sample >= timeline.num_samples or timeline.decision_follows():
            return ids, None
        return ids, self._sampler.global_batch(position.epoch, sample, size)

    def feed_of(self, dataset: SizedDataset, *, once: bool = False) -> SampleFeed:
        """Return what serves a data set to be evaluated; `once` where each is asked for once."""

        def to_come() -> Iterator[tuple[int, Tensor]]:
            return ((0, ids) for ids in self.deployment.active_stage.rounds(len(dataset)))

        return self._make_feed(dataset, to_come, once=once)

    def _make_feed(self, dataset: SizedDataset, to_come: Coming, **options: bool) -> SampleFeed:
        return SampleFeed(self._prefix, self.world, dataset, to_come=to_come, **options)

    def _to_come(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the epoch and this replica's samples of the coming step and of all after it."""
        replicas, sampler = self.transitions.replicas, copy.copy(self._sampler)
        size = self.timeline.global_batch(replicas)
        for epoch, sample in self.timeline.to_come(replicas):
            batch = sampler.global_batch(epoch, sample, size)
            yield epoch, self.deployment.active_stage.own_part(batch)

    def _sampler_of(self, dataset: SizedDataset, config: TrainConfig) -> EpochSampler:
        lengths = None
        if config.group_by_length:
            lengths = read_lengths(dataset, self.task.model.inputs[0])
        return EpochSampler(
            len(dataset), seed=config.seed, lengths=lengths, batch_size=config.global_batch_size
        )

    def first_samples(self) -> Batch:
        """Read a few samples of the training set for every rank, to try things out with."""
        return self.feed.read(torch.arange(2 * max(2, self.world.size)))

    def close(self, *, failed: bool) -> None:
        """Wait for a checkpoint, and let go of all but rank 0's model.

        Leaving the groups after an error would end the other ranks' waits, and whoever watches
        would blame them: then only this process's own things are put in order.
        """
        try:
            self.state.close(failed=failed)
        finally:
            if not failed:
                self.deployment.close()
            for feed in filter(None, (self.feed, self.evaluation_feed)):
                feed.close()
            self.transitions.close()
            self.log.close()
            if not failed:
                self.world.close()

    def _refuse_what_runs_wrongly(self) -> None:
        if self._caches:
            self.feed.check_repeatable()
        agree(self.log.open, group=self.world.group)
        probe_sublayers(self.task, self.world, self.feed.read)

    def _start_log(self) -> None:
        profile = self.transitions.decider.planner.measurements.profile
        cache_bytes = self.feed.most_bytes(profile) if self._caches else 0
        self.log.start(
            self.transitions.clock(),
            profile,
            cache_bytes=cache_bytes,
            unused=self.feed.unused_columns() if self.world.is_main else (),
        )

"""Build what a run is made of: first all that one process can refuse, then what the ranks share.

settings ─► model ─► task ═ the ranks meet ═► prefix ─► deployment ─► feed ─► elastic ─► state
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.loss import LossFunction
from freeze import FreezeChoice, FreezePolicy, FreezeSchedule, NeverFreeze, chosen_policy
from pipetransformer.checkpoint import DescribedModel, Part, RunState, Selection
from pipetransformer.checks import (
    RunChecks,
    check_settings,
    describe_task,
    naming_first_samples,
)
from pipetransformer.config import TrainConfig, make_config
from pipetransformer.elastic import Deployment, Elasticity
from pipetransformer.feed import (
    BatchForecast,
    FrozenPrefix,
    RowBudget,
    SampleFeed,
    SizedDataset,
    Timeline,
    first_samples,
    keeps_places,
    samples_of,
)
from pipetransformer.loop import refuse_wrong_rows
from pipetransformer.measure import largest_micro_batch
from pipetransformer.model import (
    DTYPES,
    LayeredModel,
    ModelLoan,
    OptimizerFactory,
    Task,
    adapt,
)
from pipetransformer.processes import FreedMemory, World, connect
from pipetransformer.report import RunLog, check_callbacks
from pipetransformer.stage import Evaluator


@dataclass(frozen=True)
class RunParts:
    """Hold what a run is made of; `Trainer` says what each part is for.

    Args:
        caches: whether frozen layers' outputs may be cached.
    """

    task: Task
    caches: bool
    policy: FreezePolicy
    loan: ModelLoan
    memory: FreedMemory
    timeline: Timeline
    coming: BatchForecast
    world: World
    deployment: Deployment
    feed: SampleFeed
    evaluator: Evaluator
    elastic: Elasticity
    log: RunLog
    selection: Selection
    state: RunState
    checks: RunChecks

    def row_budget(self) -> RowBudget:
        """Return how many rows a node's cache will have, and the most that they may take."""
        if not self.caches:
            return RowBudget()
        feeds = [feed for feed in (self.feed, self.evaluator.feed) if feed is not None]
        keepers = [feed.keeper for feed in feeds if feed.keeper.may_cache]
        batch = self.feed.read_apart(torch.arange(largest_micro_batch(self.task, self.world)))
        profile = self.elastic.planner.profile
        return sum((keeper.budget(profile, batch) for keeper in keepers), RowBudget())

    def saved_share(self, rows: RowBudget) -> float | None:
        """Reckon which share of the epochs' computing rows save; None where a policy decides.

        What an epoch reads was stored in the one before, so far as blocks were frozen there.
        """
        if not isinstance(self.policy, FreezeSchedule):
            return None
        profile, saved_s, whole_s, before = self.elastic.planner.profile, 0.0, 0.0, 0
        num = profile.batch_sizes[-1]
        for epoch in range(self.task.config.epochs):
            frozen = self.policy.at(epoch)
            active = range(profile.first_active(frozen), len(profile.sublayers))
            whole_s += profile.prefix_s(frozen, num)
            whole_s += sum(profile.forward_s(i, num) + profile.backward_s(i, num) for i in active)
            depth = self.task.prefix_depth(frozen)
            saved_s += profile.prefix_s(min(before, depth), num)
            before = depth
        return saved_s / whole_s * rows.num_rows / max(rows.num_samples, 1)


def build_parts(
    model: nn.Module | LayeredModel,
    train_dataset: SizedDataset,
    *,
    eval_dataset: SizedDataset | None,
    loss_fn: LossFunction | None,
    optimizer: OptimizerFactory | None,
    freeze: FreezeChoice | None,
    **settings: Any,
) -> RunParts:
    """Build all parts of a run from a Trainer's arguments. Collective, once nothing is refused."""
    check_callbacks(settings.get("callbacks"))
    config = make_config(settings)
    policy = _policy(freeze, config)
    config = config.deciding_every(policy.interval_share)
    check_settings(config, train_dataset, eval_dataset)
    layered = _adapt_model(model, train_dataset, loss_fn, config)
    task, traits = describe_task(layered, loss_fn, optimizer, config, policy)
    samples = samples_of(task, train_dataset)
    if config.parts:
        refuse_wrong_rows(task, samples)
    loan, memory = ModelLoan(task), FreedMemory()
    timeline = Timeline(config, len(train_dataset), traits.peak_learning_rate)
    coming = BatchForecast(task, train_dataset, timeline)
    freezes = not isinstance(policy, NeverFreeze)

    world = _join_world(config)
    coming.keep_places(keeps=keeps_places(config, world))
    prefix = FrozenPrefix(task)
    deployment = Deployment(task, world, prefix)
    feed = SampleFeed(
        prefix,
        world,
        samples,
        to_come=partial(_to_come, coming, deployment),
        keeps=config.cache_views or 1,
        keeps_places=lambda: coming.keeps_places,  # A resumed run may have another order.
    )
    evaluator = Evaluator(
        task,
        world,
        prefix,
        stage=lambda: deployment.active_stage,  # Transitions replace it.
        timeline=timeline,
        dataset=eval_dataset,
    )
    elastic = Elasticity(
        task, world, policy=policy, deployment=deployment, feed=feed, timeline=timeline
    )
    log = RunLog(world, config, freezes=freezes)
    selection = Selection(config, world, deployment)
    saved: dict[str, Part] = {
        "report": log.report,
        "log": log.sums,
        "best": selection.best,
        "coming": coming,
        "model": DescribedModel(layered.model),
    }
    if deployment.loss_scale.is_dynamic:
        saved["loss_scale"] = deployment.loss_scale
    state = RunState(task, world, elastic=elastic, parts=saved, optimizer=traits)
    checks = RunChecks(
        task=task,
        world=world,
        feed=feed,
        evaluated=evaluator.feed,
        # The loss that the model itself returns is not smoothed.
        loss_fn=task.loss_fn if config.label_smoothing else loss_fn,
        optimizer=traits.settings,
        caches=config.cache and freezes,
    )
    return RunParts(
        task=task,
        caches=config.cache and freezes,
        policy=policy,
        loan=loan,
        memory=memory,
        timeline=timeline,
        coming=coming,
        world=world,
        deployment=deployment,
        feed=feed,
        evaluator=evaluator,
        elastic=elastic,
        log=log,
        selection=selection,
        state=state,
        checks=checks,
    )


def _policy(freeze: FreezeChoice | None, config: TrainConfig) -> FreezePolicy:
    """Return what decides which layers freeze; parts are frozen from the start."""
    if not config.parts:
        return chosen_policy(freeze)
    if freeze is not None:
        raise ValueError(
            f"parts= freezes {[*config.parts]} and nothing else, and freeze= is {freeze!r}: give "
            "one of them, as for attach(model, parts=...)"
        )
    return chosen_policy(1)


def _adapt_model(
    model: nn.Module | LayeredModel,
    dataset: SizedDataset,
    loss_fn: LossFunction | None,
    config: TrainConfig,
) -> LayeredModel:
    """Find the model's sublayers; a model that no adapter knows runs on two samples."""
    read = partial(
        first_samples,
        collate_fn=config.collate_fn,
        drops_unknown=config.remove_unused_columns,
        seed=config.seed,
    )
    unties = config.tied_weights == "untie"
    with naming_first_samples(model, dataset, read):
        return adapt(
            model,
            partial(read, dataset),
            loss_fn=loss_fn,
            unties=unties,
            parts=config.parts,
            computes_in=DTYPES[config.precision],
        )


def _to_come(coming: BatchForecast, deployment: Deployment) -> Iterator[tuple[int, Tensor]]:
    """Yield the epoch and this replica's samples of the coming step and of all after it."""
    replicas = deployment.active_stage.topology.replicas
    for epoch, batch in coming.to_the_end(replicas):
        yield epoch, deployment.active_stage.share.read_of(batch)


def _join_world(config: TrainConfig) -> World:
    """Meet the other processes."""
    return replace(
        connect(config.device, timeout_s=config.setup_timeout_s),
        max_replicas=config.most_replicas(),
        stage_workers=config.stage_workers and tuple(config.stage_workers),
    )

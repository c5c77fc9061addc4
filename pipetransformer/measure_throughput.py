"""Time whole training steps of pipelines, for the tables from which the published rules take M.

Nothing is trained: every rank runs its stage on copies of its weights. Where layers are frozen,
stage 0 reads the activations behind them, one sample's, repeated, as if from a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autocache.prefix import HIDDEN
from autodp import GroupPool, gather_json
from autopipe import PipelinePlan, Table, Tables
from autopipe.chain import left_as_found, now_s
from pipetransformer.data import Batch
from pipetransformer.layer_work import Rows
from pipetransformer.measure_spans import forward, lent, run_spans
from pipetransformer.stage import Stage
from pipetransformer.task import Task, set_training, trained_parameters
from pipetransformer.world import World

HOW = "measured with as few layers frozen as fit"
"""What people are to know of the tables."""

_BUDGET_S, _MOST_ROUNDS = 10.0, 5
"""Seconds for the timed steps of a length, each of whose pipelines runs once at least."""


def measure_throughputs(
    task: Task,
    world: World,
    *,
    read: Callable[[Tensor], Batch],
    trials: Mapping[int, Sequence[PipelinePlan]],
) -> Tables:
    """Time pipelines; all ranks get the same samples a second. Collective.

    Args:
        task, world: what is trained, and where.
        read: reads samples of the training set; ids may exceed its length.
        trials: pipelines by length, the same on all ranks; those of a length differ in nothing but
            M, and use all ranks.
    """
    pool = GroupPool(
        world.rank,
        (),
        on_cuda=world.link_device.type == "cuda",
        timeout_s=task.config.setup_timeout_s,
    )
    tables = {}
    for length, plans in trials.items():
        with _trial_stage(task, world, plans=plans, pool=pool) as stage:
            rows: Rows = read
            if stage.index == 0 and plans[0].boundaries[0]:
                first_active = plans[0].boundaries[0]
                rows = _frozen_rows(task, world.device, read=read, first_active=first_active)
            tables[length] = _time_plans(task, world, plans=plans, stage=stage, rows=rows)
    # Not after a failure: groups that are left end the other ranks' waits, who would be blamed.
    pool.close()
    return tables


@contextmanager
def _trial_stage(
    task: Task, world: World, *, plans: Sequence[PipelinePlan], pool: GroupPool
) -> Iterator[Stage]:
    """Build this rank's stage on copies of its weights, with the patience of the longest plan."""
    plan = max(plans, key=lambda plan: plan.predicted_step_s)
    topology = world.topology(plan.length)
    stage_index = topology.stage_of(world.rank)
    span = range(*plan.boundaries[stage_index : stage_index + 2])
    limit_s = task.config.step_limit_s(plan.predicted_step_s)
    groups = pool.open(topology, timeout_s=limit_s)
    modules = [task.model.sublayers[index].module for index in span]
    with lent(task, world.device, span), left_as_found(modules, world.device):
        for parameter in trained_parameters(task, span).values():
            parameter.data = parameter.data.clone()  # `lent` gives the trained weights back.
        set_training(task.model, span, num_frozen=0)
        stage = Stage(task, world, plan=plan, topology=topology, groups=groups)
        try:
            yield stage
        finally:
            stage.close()


def _time_plans(
    task: Task, world: World, *, plans: Sequence[PipelinePlan], stage: Stage, rows: Rows
) -> Table:
    """Run all plans, round after round, the first untimed; return samples a second by M."""
    ids = torch.arange(task.config.global_batch(stage.topology.replicas))

    def step_s(plan: PipelinePlan) -> float:
        stage.plan = plan
        start = now_s(world.device)
        stage.train_step(ids, rows, step=0, epoch=0, learning_rate_factor=0.0)
        return max(gather_json(now_s(world.device) - start, group=world.group))

    round_s = sum(plan.predicted_step_s for plan in plans)
    num_rounds = 1 + max(1, min(_MOST_ROUNDS, int(_BUDGET_S / round_s)))
    rounds_s = [[step_s(plan) for plan in plans] for _ in range(num_rounds)]
    typical_s = map(statistics.median, zip(*rounds_s[1:], strict=True))
    return {
        plan.num_micro_batches: len(ids) / one_s
        for plan, one_s in zip(plans, typical_s, strict=True)
    }


def _frozen_rows(
    task: Task, device: torch.device, *, read: Callable[[Tensor], Batch], first_active: int
) -> Rows:
    """Run one sample through the frozen sublayers; return what repeats it as often as asked."""
    one = read(torch.zeros(1, dtype=torch.int64))
    singly = [range(index, index + 1) for index in range(first_active)]
    on_device = {name: tensor.to(device) for name, tensor in one.items()}
    *_, hidden = run_spans(
        task, device, singly, [on_device], lambda below, inputs: forward(below, inputs[0])
    )
    sample = {**one, HIDDEN: hidden.cpu()}
    return lambda ids: {name: t[torch.zeros_like(ids)] for name, t in sample.items()}

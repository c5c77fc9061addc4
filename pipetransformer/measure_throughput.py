"""Time whole training steps of pipelines, for the tables from which the published rules take M.

It is done once, before the first step, and trains nothing: every rank runs its stage on copies of
its weights. The activations behind frozen layers are one sample's, repeated, as if from a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autodp import GroupPool, gather_json
from autopipe import PipelinePlan, Table, Tables
from autopipe.chain import left_as_found
from pipetransformer.data import Batch
from pipetransformer.layer_work import Rows
from pipetransformer.measure_spans import HIDDEN, forward, lent, run_spans
from pipetransformer.stage import Stage
from pipetransformer.task import Task, set_training, trained_parameters
from pipetransformer.world import World

_BUDGET_S = 10.0
"""Seconds for the steps of one length; every pipeline is timed once at least."""

_MOST_ROUNDS = 5


def measure_throughputs(
    task: Task,
    world: World,
    read: Callable[[Tensor], Batch],
    *,
    trials: Mapping[int, Sequence[PipelinePlan]],
) -> Tables:
    """Time pipelines; all ranks get the same samples a second. Collective.

    Args:
        task, world: what is trained, and where.
        read: reads samples of the training set; ids may exceed its length.
        trials: pipelines by length; those of a length differ in nothing but M. A length without
            any is left out.
    """
    pool = GroupPool(
        world.rank,
        (),
        on_cuda=world.device.type == "cuda",
        timeout_s=task.config.setup_timeout_s,
    )
    tables = {
        length: _measure_length(task, world, read, plans=plans, pool=pool)
        for length, plans in trials.items()
        if plans
    }
    # Not after a failure: groups that are left end the other ranks' waits, who would be blamed.
    pool.close()
    return tables


def _measure_length(
    task: Task,
    world: World,
    read: Callable[[Tensor], Batch],
    *,
    plans: Sequence[PipelinePlan],
    pool: GroupPool,
) -> Table:
    """Time the pipelines of one length, round after round; return samples a second by M."""
    topology, first_active = world.topology(plans[0].length), plans[0].boundaries[0]
    stage_index = topology.stage_of(world.rank)
    span = range(0)
    if not topology.is_spare(world.rank):
        span = range(*plans[0].boundaries[stage_index : stage_index + 2])
    rows: Rows = read
    if first_active and stage_index == 0:
        rows = _frozen_rows(task, world.device, read, first_active)
    limit_s = task.config.step_limit_s(max(plan.predicted_step_s for plan in plans))
    groups = pool.open(topology, timeout_s=limit_s)
    modules = [task.model.sublayers[index].module for index in span]
    with lent(task, world.device, span), left_as_found(modules, world.device):
        for parameter in trained_parameters(task, span).values():
            parameter.data = parameter.data.clone()  # `lent` gives the trained weights back.
        set_training(task.model, span, num_frozen=0)
        stage = Stage(task, world, plan=plans[0], topology=topology, groups=groups)
        ids = torch.arange(
            task.config.batch_size * (topology.replicas if task.config.scale_batch else 1)
        )

        def step_s(plan: PipelinePlan) -> float:
            stage.plan = plan
            own_s = stage.train_step(ids, rows, step=0, epoch=0, learning_rate_factor=0.0).seconds
            return max(gather_json(own_s, group=world.group))

        step_s(plans[0])  # Builds the optimizer's state, which no other step does.
        round_s = sum(plan.predicted_step_s for plan in plans)
        num_rounds = max(1, min(_MOST_ROUNDS, int(_BUDGET_S / round_s)))
        seconds = [[step_s(plan) for plan in plans] for _ in range(num_rounds)]
        stage.close()
    typical_s = map(statistics.median, zip(*seconds, strict=True))
    return {
        plan.num_micro_batches: len(ids) / one_s
        for plan, one_s in zip(plans, typical_s, strict=True)
    }


def _frozen_rows(
    task: Task, device: torch.device, read: Callable[[Tensor], Batch], first_active: int
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

"""Put together what is trained, and refuse what cannot be, before the processes meet."""

from __future__ import annotations

from autopipe.loss import LossFunction, choose_loss, smooth_labels
from freeze import FreezePolicy, checked_scale, sets_rates
from pipetransformer.checks.model_checks import refuse_captured, refuse_model
from pipetransformer.checks.optimizer_trial import try_optimizer
from pipetransformer.config import TrainConfig
from pipetransformer.model import (
    DTYPES,
    LayeredModel,
    OptimizerFactory,
    OptimizerTraits,
    Task,
    adamw,
    decay_by_layer,
    split_by_layer,
)
from pipetransformer.processes import likely_device, world_size


def describe_task(
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


def rate_of_layer(
    policy: FreezePolicy, num_layers: int, layer: int | None, done: float
) -> float | None:
    """Return a policy's factor on a layer's learning rate, or None for the run's own.

    Args:
        layer: None is the head, which counts as a layer above the others.
        done: share of the run, 0 to 1.
    """
    return checked_scale(policy, num_layers if layer is None else layer, num_layers, done)

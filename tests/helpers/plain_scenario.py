"""Train a scenario in a hand-written loop, as what the Trainer came to is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import le
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autodp.sampler import EpochSampler
from autopipe.loss import LossFunction
from pipetransformer import LayeredModel
from pipetransformer.model import OptimizerFactory, take_state
from tests.helpers.models import Entries
from tests.helpers.scenario import Outcome, Scenario, build_adamw, slow_start


def mean_loss(
    model: nn.Module, data: TensorDataset | Entries, ids: Tensor, loss_fn: LossFunction
) -> Tensor:
    """Run the model as it is on samples; return the mean loss."""
    batch = data[ids]  # type: ignore[index]
    *inputs, target = batch if isinstance(data, TensorDataset) else batch.values()
    loss = loss_fn(model(*inputs), target)
    return loss[0] / max(1, int(loss[1])) if isinstance(loss, tuple) else loss


def usual_rate(group: dict[str, Any], step: int) -> float:
    """Return the learning rate of a group of parameters."""
    rate: float = group.setdefault("initial_lr", group["lr"])
    return rate * slow_start(step, 0)


def plain(
    scenario: Scenario,
    build: OptimizerFactory = build_adamw,
    *,
    trains: Callable[[int, int], bool] | None = None,
    loss_of: Callable[..., Tensor] = mean_loss,
) -> Outcome:
    """Train the same in a hand-written loop: one process, no micro-batches, no framework.

    Beside the losses it notes, for every step, the norm of the whole gradient and those of the
    layers, and after the steps to look at the loss over all data.

    Args:
        build: makes the optimizer of named parameters.
        trains: (step, layer) -> whether the layer trains; the scenario says by default.
        loss_of: (model, data, ids, loss) -> a step's mean loss.
    """
    layered, data, loss_fn = scenario.problem()
    options, model = scenario.options, layered.model
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = build(named)
    sampler = EpochSampler(len(data), scenario.order(len(data)))
    per_epoch = -(-len(data) // options["global_batch_size"])
    losses, extra = [], {"norms": [], "layer_norms": [], "evaluations": []}
    for step in range(per_epoch * options["epochs"]):
        epoch, position = divmod(step, per_epoch)
        num_frozen = scenario.num_frozen(step, epoch)
        own = partial(le, num_frozen) if trains is None else partial(trains, step)
        freeze_plainly(layered, dict(named), own)
        ids = sampler.global_batch(
            epoch, position * options["global_batch_size"], options["global_batch_size"]
        )
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, data, ids, loss_fn)
        loss.backward()
        extra["layer_norms"].append(norms_of_layers(layered))
        # Infinity clips nothing.
        limit = options["max_grad_norm"] or float("inf")
        extra["norms"].append(nn.utils.clip_grad_norm_([p for _, p in named], limit).item())
        for group in optimizer.param_groups:
            group["lr"] = usual_rate(group, step)
        optimizer.step()
        losses.append(loss.item())
        if step in scenario.looks:
            with torch.no_grad():
                everything = torch.arange(len(data))
                extra["evaluations"].append(mean_loss(model, data, everything, loss_fn).item())
    return Outcome(losses, dict(model.state_dict()), take_state(optimizer, dict(named)), extra)


def freeze_plainly(
    layered: LayeredModel, trainable: Mapping[str, nn.Parameter], trains: Callable[[int], bool]
) -> None:
    """Train the parameters of the layers that train, among those the user trains."""
    for index, sublayer in enumerate(layered.sublayers):
        for name in layered.tensors(index).keys() & trainable.keys():
            trainable[name].requires_grad_(trains(sublayer.layer))


def norms_of_layers(layered: LayeredModel) -> list[float]:
    """Return the gradient norm of every layer but the head; 0 without a gradient."""
    squares = [0.0] * (layered.num_layers + 1)
    for index, sublayer in enumerate(layered.sublayers):
        squares[sublayer.layer] += sum(
            float(tensor.grad.square().sum())
            for tensor in layered.tensors(index).values()
            if tensor.grad is not None
        )
    return [square**0.5 for square in squares[:-1]]

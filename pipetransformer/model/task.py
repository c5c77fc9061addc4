"""Say what is trained, and which of its parameters."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.loss import Loss
from pipetransformer.config import TrainConfig
from pipetransformer.model.layered_model import LayeredModel
from pipetransformer.model.optimizers import OptimizerFactory
from pipetransformer.model.precision import DTYPES, computing_in, run_in


@dataclass(frozen=True)
class Task:
    """Hold what is trained; the same on every rank.

    Args:
        model: the layered model.
        loss_fn: joins from the parts of a batch, or is probed.
        optimizer: builds an optimizer over named parameters.
        config: the run's settings.
        trainable: names of the parameters that the user left trainable.
        signals: what is measured of layers between decisions, named as in `LayerStats`.
    """

    model: LayeredModel
    loss_fn: Loss
    optimizer: OptimizerFactory
    config: TrainConfig
    trainable: frozenset[str]
    signals: frozenset[str] = frozenset()

    @property
    def computes_in(self) -> torch.dtype | None:
        """Return what the sublayers compute in; None is as the weights are."""
        return DTYPES[self.config.precision]

    def call(
        self, index: int, value: Tensor | Mapping[str, Tensor], *, sides: Mapping[str, Tensor]
    ) -> Tensor:
        """Run one sublayer as the run does: in training, as frozen, to evaluate or to measure.

        Arguments and errors are those of `LayeredModel.call`.
        """
        given = value if isinstance(value, Tensor) else next(iter(value.values()))
        with self.computing(given.device):
            return self.run(index, value, sides=sides)

    def computing(self, device: torch.device) -> AbstractContextManager[None]:
        """Have several sublayers compute as the run does, each called by `run`."""
        return computing_in(self.computes_in, device)

    def run(
        self, index: int, value: Tensor | Mapping[str, Tensor], *, sides: Mapping[str, Tensor]
    ) -> Tensor:
        """Run one sublayer within `computing`; see `call`."""
        return run_in(self.computes_in, self.model, index, value, sides=sides)


def trained_parameters(task: Task, indices: Iterable[int]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of sublayers by their names in the user's model."""
    return {
        name: tensor
        for index in indices
        for name, tensor in task.model.tensors(index).items()
        if isinstance(tensor, nn.Parameter) and name in task.trainable
    }


def build_optimizer(task: Task, parameters: Mapping[str, nn.Parameter]) -> Optimizer | None:
    """Return the task's optimizer over parameters; None without any."""
    if not parameters:
        return None
    optimizer = task.optimizer(list(parameters.items()))
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def modes_of(
    model: LayeredModel, indices: Iterable[int], *, training: bool
) -> list[tuple[nn.Module, bool]]:
    """Return every module of sublayers with the flag it is to have to train, or not to.

    It is the flag that the model's own `train()` or `eval()` gives it: one that keeps a part of
    itself in eval mode does so here.
    """
    flags = model.flags(training=training)
    modules = (module for i in indices for module in model.sublayers[i].module.modules())
    return [(module, flags[module]) for module in modules]


def set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give modules their flags."""
    for module, flag in modes:
        # Asked first, as a module is slow to take an attribute.
        if module.training is not flag:
            module.training = flag


@contextmanager
def in_mode(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Have modules in a mode meanwhile, whatever the user or a layer that shares them has set."""
    before = [(module, module.training) for module, flag in modes if module.training is not flag]
    set_modes(modes)
    try:
        yield
    finally:
        set_modes(before)


def set_frozen(task: Task, num_frozen: int, resting: Collection[int] = ()) -> None:
    """Take the gradients from parameters of layers that are frozen, or rest; others are as the
    user left them.
    """
    changed = False
    for index, sublayer in enumerate(task.model.sublayers):
        for name, tensor in task.model.tensors(index).items():
            if isinstance(tensor, nn.Parameter):
                trains = sublayer.layer >= num_frozen and sublayer.layer not in resting
                wanted = name in task.trainable and trains
                changed |= tensor.requires_grad is not wanted
                tensor.requires_grad_(wanted)
                tensor.grad = None
    compiler = sys.modules.get("torch._dynamo")
    if changed and compiler is not None and _has_compiled(compiler, task.model.model):
        # torch 2.11 runs what it compiled for the old flags: no gradient comes back when a layer
        # thaws (pytorch issue 139476).
        compiler.reset()


def _has_compiled(compiler: ModuleType, model: nn.Module) -> bool:
    """Tell whether torch has compiled anything: a reset without need imports for three seconds."""
    asked = any(module._compiled_call_impl is not None for module in model.modules())
    return asked or bool(compiler.utils.counters["frames"])

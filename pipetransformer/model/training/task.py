"""Say what is trained, and run it as the run does: in its precision, in train or eval mode.

In low precision sublayers compute as in a plain loop's autocast, over weights in float32:

    sublayer        0            1          ...   the last
    weights     float32       float32             float32
    computes    in torch's autocast, which chooses a dtype for each operation
    returns     what it has computed, such as residuals in float32    float32 ──► loss

Nothing is rounded that autocast leaves alone, and nothing depends on where stages are cut or how
deep a prefix is frozen. Loss, metrics, norms, sums of gradients and the optimizer are in float32.
(Ours once rounded each sublayer's output. Messages and rows took half the bytes, and a pretrained
ViT lost three points of accuracy against a plain loop. `cache_dtype` makes rows small.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.loss import Loss, LossValue
from pipetransformer.config import TrainConfig
from pipetransformer.model.layered_model import LayeredModel
from pipetransformer.model.losses import UnreadLogits
from pipetransformer.model.modules import computing_in
from pipetransformer.model.training.compiled_blocks import CompiledBlocks, num_frames
from pipetransformer.model.training.optimizers import OptimizerFactory
from pipetransformer.model.training.precision import DTYPES


@dataclass(frozen=True)
class Task:
    """Hold what is trained; the same on every rank.

    Args:
        optimizer: builds an optimizer over named parameters.
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
        """Return the dtype of autocast; None computes as the weights are."""
        return DTYPES[self.config.precision]

    def prefix_depth(self, num_frozen: int) -> int:
        """Return how many of the frozen layers never change, and can be run without gradients."""
        trains = self.config.tied_weights == "train"
        return 0 if trains and self.model.shared_above(num_frozen) & self.trainable else num_frozen

    @property
    def leaves_out_logits(self) -> bool:
        """Return whether the loss does without logits, wherever nobody else reads them."""
        words = self.model.words
        return words is not None and words.is_plain and self.loss_fn.takes_unread

    def loss(
        self, output: Tensor, target: Any, *, headless: bool = False, keeps_many: bool = False
    ) -> LossValue:
        """Return the loss of the head's output, or of what its linear layer would be given.

        Args:
            headless: whether it is that.
            keeps_many: whether losses of other micro-batches are kept before its backward.
        """
        if not headless:
            return self.loss_fn(output, target)
        words = self.model.words
        assert words is not None, "it leaves out logits"
        many = keeps_many and words.linear.weight.requires_grad
        # In float16 gradients are too small before the loss is scaled.
        in_backward = many or self.computes_in == torch.float16
        unread = UnreadLogits(output, words, self.computes_in, in_backward)
        return self.loss_fn(unread, target)

    def call(
        self,
        index: int,
        value: Tensor | Mapping[str, Tensor],
        *,
        sides: Mapping[str, Tensor],
        headless: bool = False,
    ) -> Tensor:
        """Run one sublayer as the run does; the last returns float32. See `LayeredModel.call`."""
        given = value if isinstance(value, Tensor) else next(iter(value.values()))
        is_last = index == len(self.model.sublayers) - 1
        with self.computing(given.device):
            output = self.model.call(index, value, sides=sides, headless=headless)
        return self.in_float32(output) if is_last and not headless else output

    def computing(self, device: torch.device) -> AbstractContextManager[None]:
        """Have several sublayers compute as the run does."""
        return computing_in(self.computes_in, device)

    def compiled(self, indices: Iterable[int]) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which blocks among sublayers run compiled, if that is set.

        It holds for which parameters need gradients now. A step's backwards belong into it, too,
        as layers may run forward again in them.
        """
        return self._blocks.of(indices) if self.config.compile else nullcontext

    @cached_property
    def _blocks(self) -> CompiledBlocks:
        backend, mode = self.config.compile_backend, self.config.compile_mode
        return CompiledBlocks(self.model, backend=backend, mode=mode)

    def in_float32(self, output: Tensor) -> Tensor:
        """Return the model's output as losses take it, where it was computed in less."""
        casts = self.computes_in is not None and output.is_floating_point()
        return output.to(torch.float32) if casts else output


def trained_parameters(task: Task, indices: Iterable[int]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of sublayers by their names in the user's model."""
    return {
        name: tensor
        for index in indices
        for name, tensor in task.model.tensors(index).items()
        if isinstance(tensor, nn.Parameter) and name in task.trainable
    }


def owned_parameters(task: Task, index: int) -> dict[str, nn.Parameter]:
    """Return a sublayer's trainable parameters without those that one below it shares."""
    parameters = trained_parameters(task, (index,))
    return {name: p for name, p in parameters.items() if task.model.owners[name] == index}


def build_optimizer(task: Task, parameters: Mapping[str, nn.Parameter]) -> Optimizer | None:
    """Return the task's optimizer over parameters; None without any."""
    if not parameters:
        return None
    optimizer = task.optimizer(list(parameters.items()))
    # As torch's schedulers note it: the rate of each step is a multiple of it.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def modes_of(
    model: LayeredModel, indices: Iterable[int], *, training: bool
) -> list[tuple[nn.Module, bool]]:
    """Return every module of sublayers with the flag that the model's `train()` or `eval()` sets.

    A model that overrides `train()` to keep a part of itself in eval mode does so here, too.
    """
    flags = model.flags(training=training)
    modules = (module for i in indices for module in model.sublayers[i].module.modules())
    return [(module, flags[module]) for module in modules]


def set_frozen(task: Task, num_frozen: int, resting: Collection[int] = ()) -> None:
    """Have frozen and resting layers need no gradient; other layers' flags are the user's."""
    changed = False
    training = task.config.tied_weights == "train"
    tied = task.model.shared_above(num_frozen) if training else frozenset()
    for index, sublayer in enumerate(task.model.sublayers):
        for name, tensor in task.model.tensors(index).items():
            # A tied tensor freezes with its first sublayer.
            if isinstance(tensor, nn.Parameter) and task.model.owners[name] == index:
                trains = sublayer.layer >= num_frozen and sublayer.layer not in resting
                wanted = name in task.trainable and (trains or name in tied)
                changed |= tensor.requires_grad is not wanted
                tensor.requires_grad_(wanted)
                tensor.grad = None
    compiler = sys.modules.get("torch._dynamo")
    if changed and compiler is not None and _has_compiled(task.model.model):
        # torch 2.11 goes on with what it compiled for the old flags: a layer that thaws would get
        # no gradient (pytorch issue 139476).
        compiler.reset()


def _has_compiled(model: nn.Module) -> bool:
    """Return whether torch has compiled more than our blocks, which know their flags.

    A reset without need takes three seconds, and compiles blocks anew.
    """
    asked = any(module._compiled_call_impl is not None for module in model.modules())
    return asked or num_frames() > CompiledBlocks.num_frames

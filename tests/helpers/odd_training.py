"""Name the losses and optimizers that train odd models, and say which of them may be refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import Optimizer

from autopipe.loss import LossFunction
from pipetransformer.model import NamedParameters, OptimizerFactory
from tests.helpers.models import IGNORED
from tests.helpers.odd_layers import NUM_CLASSES


@dataclass(frozen=True)
class Loss:
    """Name a loss.

    Args:
        build: makes it.
        targets: "classes", "some" of which are left out, "values", or "shares" of the classes.
        words: of which a refusal has one; none where it may not be refused.
        must: whether there is nothing to compare it with, so that it has to be refused.
    """

    build: Callable[[], LossFunction]
    targets: str = "classes"
    words: tuple[str, ...] = ()
    must: bool = False


def class_weights() -> Tensor:
    """Return a weight for each class."""
    return torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def halved_squares(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over the samples."""
    return 0.5 * (output - target).square().sum(dim=1).mean()


def squares_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return a sum, and over how many it is."""
    return (output - target).square().sum(), output.numel()


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of the targets that count, and how many these are, as a tensor."""
    total = functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def root_of_mean(output: Tensor, target: Tensor) -> Tensor:
    """Return what is no mean over the samples: the root of one."""
    return (output - target).square().mean().sqrt()


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean whose divisor depends on the targets."""
    return functional.cross_entropy(output, target, weight=class_weights().to(output))


class RootOfMean(nn.MSELoss):
    """Return the root of torch's own loss, whose class it extends."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).sqrt()


def rooted_by_hook() -> nn.Module:
    """Build torch's own loss, with a hook that changes what it returns."""
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda _module, _inputs, output: output.sqrt())
    return loss


LOSSES: dict[str, Loss] = {
    "ce": Loss(nn.CrossEntropyLoss),
    "ce_function": Loss(lambda: functional.cross_entropy),
    "ce_smooth": Loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.2)),
    "mse": Loss(nn.MSELoss, "values"),
    "l1": Loss(nn.SmoothL1Loss, "values"),
    "mean": Loss(lambda: halved_squares, "values"),
    "count": Loss(lambda: squares_and_count, "values"),
    "counted": Loss(lambda: counted, "some"),
    "ce_weight": Loss(lambda: nn.CrossEntropyLoss(class_weights())),
    "ce_ignore": Loss(nn.CrossEntropyLoss, "some"),
    "ce_all": Loss(lambda: nn.CrossEntropyLoss(class_weights(), label_smoothing=0.1), "some"),
    "ce_shares": Loss(lambda: nn.CrossEntropyLoss(class_weights(), label_smoothing=0.1), "shares"),
    "bce": Loss(lambda: nn.BCEWithLogitsLoss(pos_weight=class_weights()), "shares"),
    "nll": Loss(lambda: nn.NLLLoss(class_weights()), "some"),
    "margin": Loss(lambda: nn.MultiMarginLoss(weight=class_weights())),
    "kl": Loss(lambda: nn.KLDivLoss(reduction="batchmean"), "shares"),
    "ce_function_ignore": Loss(lambda: functional.cross_entropy, "some"),
}
ODD_LOSSES: dict[str, Loss] = {
    "root": Loss(lambda: root_of_mean, "values", ("loss",)),
    "weighted": Loss(lambda: weighted, "classes", ("loss",)),
    "weighted_partial": Loss(
        lambda: partial(functional.cross_entropy, weight=class_weights()), "some", ("loss",)
    ),
    "root_class": Loss(RootOfMean, "values", ("loss",)),
    "root_hook": Loss(rooted_by_hook, "values", ("loss",)),
    "mse_none": Loss(lambda: nn.MSELoss(reduction="none"), "values", ("reduction",), must=True),
    "ce_sum": Loss(
        lambda: nn.CrossEntropyLoss(reduction="sum"), "classes", ("sum", "reduction"), must=True
    ),
    "mse_sum": Loss(
        lambda: nn.MSELoss(reduction="sum"), "values", ("sum", "reduction"), must=True
    ),
}


class GuessingRate(Optimizer):
    """Descend at a rate that grows with the gradients seen, as Prodigy's does; it is a group's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] += 0.1 * float(sum(g.abs().sum() for g in gradients))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * group["d"])


class CountingSteps(Optimizer):
    """Descend ever slower, by the steps that a group counts, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / math.sqrt(group["k"]))


class Remembering(Optimizer):
    """Descend ever slower, by the steps counted outside of groups and of parameters' states.

    Args:
        params, lr: see `Optimizer`.
        in_state: whether the count is in the optimizer's state, under a name, or an attribute.
    """

    def __init__(self, params: Any, lr: float, in_state: bool) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.in_state = in_state
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.in_state:
            num_steps = self.state["all"].get("num_steps", 0) + 1
            self.state["all"]["num_steps"] = num_steps
        else:
            num_steps = self.num_steps = self.num_steps + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] / math.sqrt(num_steps)
                    parameter.add_(parameter.grad, alpha=-rate)


class GlobalNorm(Optimizer):
    """Descend by gradients over the norm of all of them, as LAMB does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in given) ** 0.5
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / max(norm, 0.1))


@dataclass(frozen=True)
class Descent:
    """Name an optimizer; `may_refuse` and `must` are as those of a loss.

    Args:
        kind: its class.
        options: its settings.
        decays: what weights decay by; 0 for a class that knows no decay, where parameters that are
            not to decay get half the rate instead.
        grouped: whether it takes groups of parameters.
        named: whether it is told the parameters' names, which it keeps in its groups.
        empty: whether groups without parameters, as a part of a model may have, are left in.
    """

    kind: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    decays: float = 0.0
    grouped: bool = True
    named: bool = False
    empty: bool = True
    may_refuse: bool = False
    must: bool = False

    def factory(self) -> OptimizerFactory:
        """Return what builds it over named parameters: in two groups, as their attributes say."""

        def build(named: NamedParameters) -> Optimizer:
            if not self.grouped:
                return self.kind([p for _, p in named], **self.options)
            undecayed = {n for n, p in named if getattr(p, "_no_weight_decay", n.endswith("bias"))}
            plain, other = (
                [(n, p) if self.named else p for n, p in named if (n in undecayed) == apart]
                for apart in (True, False)
            )
            rate = self.options["lr"]
            apart = {"weight_decay": 0.0} if self.decays else {"lr": rate / 2}
            both = {"weight_decay": self.decays} if self.decays else {}
            groups = [{"params": other, **both}, {"params": plain, **apart}]
            return self.kind([g for g in groups if g["params"] or self.empty], **self.options)

        return build


OPTIMIZERS: dict[str, Descent] = {
    "sgd": Descent(optim.SGD, {"lr": 0.05}, 0.1),
    "nesterov": Descent(optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, 0.1),
    # With momentum, torch refuses parameters that get a first gradient later than others.
    "sgd_fused": Descent(optim.SGD, {"lr": 0.05, "fused": True}, 0.1),
    "amsgrad": Descent(optim.Adam, {"lr": 0.01, "amsgrad": True}, 0.1),
    "adam_fused": Descent(optim.Adam, {"lr": 0.01, "fused": True}, 0.1),
    "adamw": Descent(optim.AdamW, {"lr": 0.01}, 0.1),
    "adamw_fused": Descent(optim.AdamW, {"lr": 0.01, "fused": True}, 0.1),
    "adamw_foreach": Descent(optim.AdamW, {"lr": 0.01, "foreach": True}, 0.1),
    "adamw_named": Descent(optim.AdamW, {"lr": 0.01}, 0.1, named=True, empty=False),
    "adamw_tensor": Descent(optim.AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64)}, 0.1),
    "adamax": Descent(optim.Adamax, {"lr": 0.01}, 0.1),
    "nadam": Descent(optim.NAdam, {"lr": 0.01}, 0.1),
    "radam": Descent(optim.RAdam, {"lr": 0.01}, 0.1),
    "adagrad": Descent(optim.Adagrad, {"lr": 0.05}, 0.1),
    "adagrad_fused": Descent(optim.Adagrad, {"lr": 0.05, "fused": True}, 0.1),
    "adadelta": Descent(optim.Adadelta, {"lr": 1.0}, 0.1),
    "rmsprop": Descent(optim.RMSprop, {"lr": 0.005, "centered": True, "momentum": 0.5}, 0.1),
    "rprop": Descent(optim.Rprop, {"lr": 0.003}),
    "asgd": Descent(optim.ASGD, {"lr": 0.05, "t0": 3.0}, 0.1),
    "adafactor": Descent(optim.Adafactor, {"lr": 0.02}, 0.1),
}
ODD_OPTIMIZERS: dict[str, Descent] = {
    "lbfgs": Descent(optim.LBFGS, {"lr": 0.1}, grouped=False, may_refuse=True, must=True),
    # torch refuses a group without parameters where others have names.
    "adamw_empty": Descent(optim.AdamW, {"lr": 0.01}, 0.1, named=True, may_refuse=True),
    "sparse_adam": Descent(optim.SparseAdam, {"lr": 0.1}, may_refuse=True, must=True),
    "attribute": Descent(Remembering, {"lr": 0.05, "in_state": False}, 0.1, may_refuse=True),
    "named_state": Descent(Remembering, {"lr": 0.05, "in_state": True}, 0.1, may_refuse=True),
    "guessing": Descent(GuessingRate, {"lr": 0.05}, 0.1, may_refuse=True),
    "counting": Descent(CountingSteps, {"lr": 0.05}, 0.1, may_refuse=True),
    "global_norm": Descent(GlobalNorm, {"lr": 0.05}, 0.1, may_refuse=True),
}


def targets_of(loss: Loss, inputs: Tensor, batches: list[Tensor]) -> Tensor:
    """Make targets that inputs (N, ...) tell something of.

    Args:
        loss: which targets it takes.
        inputs: of all samples.
        batches: the ids of every step; of each, a target counts, as a mean over none is no number.
    """
    numbers = inputs.double().flatten(1)
    values = torch.stack([numbers[:, i].sin() + numbers[:, -1] for i in range(NUM_CLASSES)], 1)
    if loss.targets == "values":
        return values
    if loss.targets == "shares":
        return values.softmax(dim=1)
    classes = values.argmax(dim=1)
    if loss.targets == "some":
        classes[torch.arange(len(classes)) % 5 != 0] = IGNORED
        for ids in batches:
            if (classes[ids] == IGNORED).all():
                classes[ids[0]] = 0
    return classes

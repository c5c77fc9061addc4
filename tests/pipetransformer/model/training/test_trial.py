"""Prove that an optimizer is refused exactly where a stage of its own would change its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer import adamw
from pipetransformer.checks import try_optimizer
from pipetransformer.model import NamedParameters, OptimizerFactory, OptimizerTraits
from tests.helpers.models import tiny_model

CPU = torch.device("cpu")


def plain(kind: Any, **settings: Any) -> OptimizerFactory:
    """Build an optimizer over all parameters alike."""
    return lambda named: kind([p for _, p in named], **settings)


def traits(factory: OptimizerFactory, model: nn.Module | None = None) -> OptimizerTraits:
    return try_optimizer(factory, model or tiny_model(), CPU)


class StepSize(Optimizer):
    """Estimate one step size from the gradients of all parameters, as Prodigy does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norms = [float(p.grad.norm()) for p in group["params"]]
            group["d"] = max(group["d"], 1e-3 * sum(norms))
            for parameter in group["params"]:
                parameter -= group["lr"] * group["d"] * parameter.grad


class CountedSteps(Optimizer):
    """Count steps in the groups, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter -= group["lr"] / group["k"] * parameter.grad


class Remembering(Optimizer):
    """Keep a running number as an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.total += 1
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 / float(self.total) * parameter.grad


class Shared(Optimizer):
    """Keep state under a key that is no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] = {"count": self.state.get("all", {}).get("count", 0) + 1}
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


class Clipped(Optimizer):
    """Divide by the norm of all gradients, as LAMB does at its default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm().clamp(min=1.0)
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad / norm


KNOWN: dict[str, tuple[OptimizerFactory, tuple[str, ...]]] = {
    "SGD": (plain(torch.optim.SGD, lr=0.1), ()),
    "momentum": (plain(torch.optim.SGD, lr=0.1, momentum=0.9), ("momentum_buffer",)),
    "Adam": (plain(torch.optim.Adam, lr=0.1), ("exp_avg", "exp_avg_sq", "step")),
    "AMSGrad": (
        plain(torch.optim.Adam, lr=0.1, amsgrad=True),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    ),
    "ours": (adamw(0.1), ("exp_avg", "exp_avg_sq", "step")),
    "Adamax": (plain(torch.optim.Adamax, lr=0.1), ("exp_avg", "exp_inf", "step")),
    "NAdam": (plain(torch.optim.NAdam, lr=0.1), ("exp_avg", "exp_avg_sq", "mu_product", "step")),
    "RAdam": (plain(torch.optim.RAdam, lr=0.1), ("exp_avg", "exp_avg_sq", "step")),
    "Adagrad": (plain(torch.optim.Adagrad, lr=0.1), ("step", "sum")),
    "Adadelta": (plain(torch.optim.Adadelta, lr=0.1), ("acc_delta", "square_avg", "step")),
    "RMSprop": (plain(torch.optim.RMSprop, lr=0.1), ("square_avg", "step")),
    "Rprop": (plain(torch.optim.Rprop, lr=0.1), ("prev", "step", "step_size")),
    "ASGD": (plain(torch.optim.ASGD, lr=0.1), ("ax", "eta", "mu", "step")),
    "Adafactor": (
        plain(torch.optim.Adafactor, lr=0.1),
        ("col_var", "row_var", "step", "variance"),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_torch_s_own_optimizers_are_known_by_what_they_keep(name: str) -> None:
    factory, entries = KNOWN[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = traits(factory, tiny_model(dtype=dtype))
        assert found.entries == entries
        assert found.peak_learning_rate == pytest.approx(0.1)
        assert found.name.startswith("torch.optim")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (plain(torch.optim.LBFGS), r"LBFGS cannot take a step .*'closure'; use an optimizer"),
        (plain(torch.optim.SparseAdam), r"SparseAdam cannot take a step from dense gradients"),
        (plain(StepSize), r"StepSize keeps 'd' in its parameter groups beside the state of its"),
        (plain(CountedSteps), r"CountedSteps keeps 'k' in its parameter groups beside"),
        (plain(Remembering), r"Remembering keeps the attribute 'total' beside the state"),
        (plain(Shared), r"Shared keeps state beside the state of its parameters"),
        (plain(Clipped), r"Clipped updates '0.weight' in another way where it does not train"),
        (
            lambda named: torch.optim.SGD(tiny_model().parameters(), lr=0.1),
            r"built a torch.optim.sgd.SGD over other parameters than it was given",
        ),
    ],
)
def test_what_a_stage_of_its_own_would_change_is_refused(
    factory: OptimizerFactory, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        traits(factory)


def test_stand_ins_have_the_names_dimensions_and_notes_of_the_parameters() -> None:
    model, seen = tiny_model(), list[tuple[str, int, bool]]()
    model[0].weight.is_special = True  # type: ignore[assignment]

    def factory(named: NamedParameters) -> Optimizer:
        seen.extend((name, p.ndim, hasattr(p, "is_special")) for name, p in named)
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    traits(factory, model)
    named = [(name, p.ndim, name == "0.weight") for name, p in model.named_parameters()]
    assert seen[: len(named)] == named


def test_neither_the_model_nor_random_numbers_change() -> None:
    model = tiny_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state: Tensor = torch.get_rng_state()
    traits(adamw(), model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None, name


def test_a_model_that_trains_nothing_has_no_optimizer() -> None:
    assert traits(adamw(), tiny_model().requires_grad_(False)) == OptimizerTraits("", 0.0, ())


# NaN is not NaN: the comparison of its parts said that it updates them in another way.
@pytest.mark.parametrize("given", [{"lr": math.inf}, {"weight_decay": math.inf}])
def test_settings_that_are_no_finite_numbers_are_named(given: dict[str, float]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"AdamW has {name}={value} in its parameter groups"):
        traits(lambda named: torch.optim.AdamW([p for _, p in named], **given))


@pytest.mark.parametrize("rate", [math.nan, -1.0])
def test_a_rate_that_the_optimizer_refuses_is_not_put_down_to_parts(rate: float) -> None:
    with pytest.raises(ValueError, match="for all parameters: .*Invalid learning rate") as caught:
        traits(adamw(rate))
    assert "alone" not in str(caught.value)

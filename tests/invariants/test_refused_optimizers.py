"""Prove that optimizers which a part of a model or a transition would change are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from tests.helpers.loops import TINY, Named, assert_as_loop, loop, make_trainer, train


def by_position(named: Named) -> Optimizer:
    """Let rates fall with a parameter's place in the list."""
    return SGD([{"params": [p], "lr": 0.1 * 0.7**i} for i, (_, p) in enumerate(named)], lr=0.1)


class Secret(SGD):
    """Count steps where nobody looks."""

    _t = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._t += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(self._t)
        super().step()


class Wrapping(Optimizer):
    """Leave all to an optimizer within."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def averaged(named: Named) -> Optimizer:
    """Pull weights towards their mean over the steps, from a hook."""
    optimizer, means = SGD([p for _, p in named], lr=0.1), dict[str, Tensor]()

    def pull(*_: Any) -> None:
        for name, parameter in named:
            mean = means.setdefault(name, parameter.detach().clone())
            mean.lerp_(parameter.detach(), 0.1)
            parameter.data.lerp_(mean, 0.5)

    optimizer.register_step_post_hook(pull)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (by_position, "updates '.*' in another way where it does not train the other"),
        (
            lambda named: Secret([p for _, p in named], lr=0.1),
            "keeps the attribute '_t' beside the state",
        ),
        (lambda named: Wrapping([p for _, p in named]), "in another way once it is built anew"),
        (averaged, "in another way once it is built anew"),
        (lambda named: SGD([p for n, p in named if n.startswith("5")], lr=0.1), "fails for the"),
        (lambda named: AdamW([p for _, p in named], lr=None), "fails for all parameters"),  # type: ignore[arg-type]
    ],
)
def test_optimizers_that_a_part_or_a_move_would_change_are_refused(
    optimizer: Any, message: str
) -> None:
    # They lost what they kept elsewhere at every transition, or trained otherwise in every stage.
    with pytest.raises(ValueError, match=message):
        make_trainer(replace(TINY, optimizer=optimizer))


def test_an_optimizer_that_needs_a_closure_is_refused_at_the_start() -> None:
    # It ended within the first step, as "step() missing 1 required positional argument".
    with pytest.raises(ValueError, match=r"LBFGS cannot take a step .* needs no closure"):
        make_trainer(replace(TINY, optimizer=lambda named: LBFGS([p for _, p in named])))


def slashed(named: Named) -> Optimizer:
    """Keep state under a name with a slash."""

    class Slashed(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["mean/slow"] = p.detach().clone()

    return Slashed([p for _, p in named], lr=0.1)


def test_state_may_have_slashes_in_its_names() -> None:
    job = replace(TINY, optimizer=slashed, frozen=(0, 1))
    assert_as_loop(train(job), loop(job))

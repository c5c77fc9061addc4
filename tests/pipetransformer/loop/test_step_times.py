"""What a step's layers cost is told apart, and no more than a step is said to be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipetransformer.loop.policy.step_times import StepCosts, StepTimes


def test_costs_are_of_the_layers_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def passing(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Takes(torch.autograd.Function):
        """Take 1 s forward and 2 s back."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            passing(1.0)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            passing(2.0)
            return gradient

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Takes.apply(super().forward(x))  # type: ignore[no-untyped-call, no-any-return]

    monkeypatch.setattr(StepTimes, "_now", lambda self: now)
    model = nn.Sequential(nn.Linear(2, 8), nn.Sequential(*(Slow(8, 8) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = StepTimes(model, list(model[1]))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        passing(1.0)  # The update, which no layer's copies are seen to take a share of.
        times.end_update()
        times.end_step()
    costs = times.close()
    assert costs is not None and len(times._steps) == 4
    # 4 x (1 + 2) and the update; the first step does not count.
    assert costs.step_s == 13.0
    assert costs.saved_share(4, cached=True) == 12 / 13
    assert costs.saved_share(2, cached=False) == 4 / 13
    assert costs.saved_share(0, cached=True) == 0
    assert times.close() is not None


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_behind_a_step_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch, evaluates: bool
) -> None:
    clock = [0.0]

    class Timed(nn.Module):
        """Take 4 s forward, 1 s in evaluation, and 8 s backward."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.linear.weight.register_hook(self._back)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock[0] += 4 if self.training else 1
            output: torch.Tensor = self.linear(x)
            return output

        def _back(self, gradient: torch.Tensor) -> None:
            clock[0] += 8

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Timed(), Timed()))
    times = StepTimes(model, list(model[1]))
    monkeypatch.setattr(times, "_now", lambda: clock[0])
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
        times.end_update()
        times.end_step()
        if evaluates:  # Which is no part of a step.
            with torch.no_grad():
                model.eval()(torch.ones(2, 8))
                model.train()
    costs = times.close()
    assert costs == StepCosts(24.0, (4.0, 4.0), (8.0, 8.0), (0.0, 0.0))
    assert costs.saved_share(1, cached=False) == 8 / 24
    assert costs.saved_share(1, cached=True) == (4 + 8) / 24


def test_no_more_than_the_whole_step_is_saved_where_few_weights_train() -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    times = StepTimes(model, list(model[1]))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(8, 2)).sum().backward()
        optimizer.step()
        times.end_update()
        times.end_step()
    costs = times.close()
    assert costs is not None and max(costs.update_s[:3]) < costs.update_s[3]
    assert 0 < costs.saved_share(4, cached=True) <= 1

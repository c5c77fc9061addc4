"""A block's trial leaves no trace: in hooks, attributes, lists that others hold, or generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from freeze.advisor.step_times import StepTimes
from freeze.advisor.trial_forward import can_run_apart, frozen_forward_s


class Expert(nn.Module):
    """Leave a loss behind, as mixtures of experts do, and whatever else a forward may leave."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(3, 3), losses
        self.counts: dict[str, list[int]] = {"calls": []}
        self.total = torch.zeros(())
        self.run = self.linear_of
        self.aux_loss: Tensor | None = None

    def linear_of(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out = self.run(x)
        self.aux_loss = out.square().mean()
        self.losses.append(self.aux_loss)
        self.counts["calls"].append(len(x))
        self.total += 1
        return out * random.uniform(0.5, 1) + np.random.uniform()


class Experts(nn.Module):
    """Have blocks that hand on a list of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.blocks = nn.ModuleList(nn.Sequential(Expert(self.losses)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        for block in self.blocks:
            x = block(x)
        own: Any = sum(expert.aux_loss for expert in self.modules() if isinstance(expert, Expert))
        loss: Tensor = x.square().mean() + own + torch.stack(self.losses).sum()
        return loss


def test_what_blocks_leave_behind_is_of_their_own_forward_alone() -> None:
    ended: list[Any] = []
    for watches in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, fired = Experts(), list[str]()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_, noted=fired: noted.append("before"))
                module.register_forward_hook(lambda *_, noted=fired: noted.append("behind"))
        times = StepTimes(model, list(model.blocks)) if watches else None
        for _ in range(5):
            model(torch.ones(4, 3)).backward()
            if times is not None:
                times.end_update()
                times.end_step()
        kept = [(x.counts, float(x.total)) for x in model.modules() if isinstance(x, Expert)]
        gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        ended.append((fired, kept, gradients, random.random(), np.random.uniform()))
    assert ended[0] == ended[1] and len(fired) == 2 * 2 * 5
    # The trials took place: what has none is NaN.
    assert times is not None and all(seconds > 0 for one in times._trials for seconds in one)


def test_a_trial_runs_the_class_s_forward_with_the_block_s_weights() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop, self.linear = (
                nn.BatchNorm1d(3),
                nn.Dropout(0.5),
                nn.Linear(3, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(self.drop(self.norm(x)))
            seen.append(out)
            return out

    block = Noted()
    block(torch.rand(8, 3)).sum().backward()
    x = torch.rand(8, 3)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    assert frozen_forward_s(block, (x,), {}, iter([1.0, 3.5]).__next__) == 2.5
    expected = copy.deepcopy(block).eval()(x)
    assert torch.equal(seen[1], expected) and not seen[1].requires_grad
    assert block.training and block.norm.training and block.linear.weight.grad is not None
    assert all(torch.equal(t, before[name]) for name, t in block.state_dict().items())


def with_another_forward() -> nn.Module:
    block: Any = nn.Sequential(nn.Linear(3, 3))
    block[0].forward = block[0].forward
    return block


def compiled() -> nn.Module:
    block = nn.Sequential(nn.Linear(3, 3))
    block[0].compile()
    return block


def traced() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(3, 3)))


@pytest.mark.parametrize("build", [with_another_forward, compiled, traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_cannot_be_copied_has_no_trial(build: Callable[[], nn.Module]) -> None:
    assert not can_run_apart(build(), (torch.ones(1, 3),))
    assert can_run_apart(nn.Sequential(nn.Linear(3, 3)), (torch.ones(1, 3),))
    assert not can_run_apart(nn.Sequential(nn.Linear(3, 3)), (object(),))


def test_a_hook_of_all_modules_is_called_as_without_trials() -> None:
    calls: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *found: calls.append(found[0]))
    try:
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        times = StepTimes(model, list(model[1]))
        model(torch.ones(2, 3)).sum().backward()
        times.end_step()
    finally:
        handle.remove()
    assert len(calls) == 5


def test_a_trial_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(nn.Module):
        """Run in training alone."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("no memory left")
            out: Tensor = self.linear(x)
            return out

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Picky(), Picky()))
    times = StepTimes(model, list(model[1]))
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        times.end_update()
        times.end_step()
    costs = times.close()
    assert costs is not None and costs.frozen_s == costs.forward_s
    (record,) = caplog.records
    assert "layer 0, of Picky, cannot run once more" in record.getMessage()
    assert "RuntimeError: no memory left" in record.getMessage()

"""Prove that watching changes nothing, that acting freezes for good, and what is said of it."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from freeze import FreezeContext, FreezeDecision, FreezeOut, PaperRule, QuietUpdates
from freeze.advisor import Advice, Observer
from freeze.advisor.advice import Look
from freeze.advisor.step_times import StepCosts, StepTimes
from freeze.signals import WeightChanges
from tests.helpers.freezing import Net, make_context, same, state


def fit(
    model: nn.Module,
    observer: Observer | None,
    *,
    steps: int = 8,
    first: int = 0,
    rate: float = 0.1,
) -> None:
    """Train as a loop of one's own does, telling the observer."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if observer is not None:
        observer.begin(model, max_steps=8, steps_per_epoch=4)
    for step in range(first, steps):
        model.train()
        optimizer.zero_grad()
        model(torch.ones(6, 3)).square().mean().backward()
        optimizer.step()
        if observer is not None:
            observer.end_update()
            observer.end_step(step + 1, learning_rate=rate)


def two_by_step_four(context: FreezeContext) -> int:
    return 2 if context.step >= 4 else 0


def test_watching_changes_nothing() -> None:
    torch.manual_seed(1)
    watched = Net()
    alone = copy.deepcopy(watched)
    observer = Observer(QuietUpdates(1e3, begin=0), every_steps=2)
    fit(watched, observer)
    fit(alone, None)
    assert same(state(watched), state(alone))
    advice = observer.end()
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in watched.modules()]
    assert not any(before or after for before, after in hooks)
    assert advice.num_frozen == 3 and advice.since == 2
    assert str(advice).startswith("layers 0-2 of 4 quiet since step 2: freezing them would save")
    assert [look.step for look in advice.looks] == [2, 4, 6, 8]


class Embedded(nn.Module):
    """Two blocks behind an embedding, the first of which has no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        output: torch.Tensor = self.blocks[1](hidden + 0 * self.blocks[0](hidden))
        return output


def test_layer_0_is_looked_at_with_all_that_freezes_with_it() -> None:
    torch.manual_seed(1)
    model, observer = Embedded(), Observer(QuietUpdates(1e-5, begin=0), every_steps=2)
    for block in model.blocks:
        block.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    fit(model, observer, steps=2)
    (look,) = observer.advice.looks
    assert look.updates[0] is not None and look.updates[0] > 1e-3  # The embedding's.
    assert look.num_frozen == 0


def test_a_layer_that_only_decays_is_not_quiet() -> None:
    torch.manual_seed(1)
    model, observer = Embedded(), Observer(QuietUpdates(1.0, begin=0), every_steps=2)
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    observer.begin(model, max_steps=4, steps_per_epoch=2)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.ones(6, 3)).square().mean().backward()
        optimizer.step()
        observer.end_update()
        observer.end_step(step, learning_rate=0.1)
    assert [look.updates[0] for look in observer.advice.looks] == [None, None]
    assert all(look.updates[1] and look.num_frozen == 0 for look in observer.advice.looks)


def test_acting_freezes_in_place_and_a_resumed_run_freezes_again() -> None:
    torch.manual_seed(1)
    model = Net()
    observer = Observer(two_by_step_four, every_steps=2, act=True)
    fit(model, observer, steps=4)
    frozen, above = state(model.blocks[1]), state(model.blocks[2])
    saved = json.loads(json.dumps(observer.state_dict()))
    resumed = copy.deepcopy(model)
    for parameter in resumed.parameters():
        parameter.requires_grad_(True)  # As a model that was built anew.
    del resumed._frozen_in_place
    fit(model, observer, steps=8, first=4)
    assert same(frozen, state(model.blocks[1])) and not same(above, state(model.blocks[2]))
    again = Observer(two_by_step_four, every_steps=2, act=True)
    again.load_state_dict(saved)
    fit(resumed, again, steps=8, first=4)
    assert same(frozen, state(resumed.blocks[1]))
    assert str(again.end()).startswith("layers 0-1 of 4 frozen since step 4: saves ")


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
    # 4 x (1 + 2) and the update; the first step, in which blocks run once more, does not count.
    assert costs.step_s == 13.0
    assert costs.saved_share(4, cached=True) == 12 / 13
    assert costs.saved_share(2, cached=False) == 4 / 13
    assert costs.saved_share(0, cached=True) == 0
    assert times.close() is not None


class Unruly(nn.Module):
    """Draw, count, and write into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        drawn = nn.functional.dropout(self.linear(x), 0.5)  # In evaluation, too.
        return self.norm(drawn.mul_(scale)) + x


@pytest.mark.parametrize("compiled", [False, True])
def test_running_a_block_as_if_frozen_leaves_no_trace(compiled: bool) -> None:
    def train(watched: bool) -> tuple[list[torch.Tensor], float]:
        torch.manual_seed(0)
        block, scale = Unruly().train(), torch.full((3,), 2.0)
        if compiled:
            block.compile(backend="eager")
        fired: list[object] = []
        block.linear.register_forward_hook(lambda *found: fired.append(found[0]))
        model = nn.ModuleList([block])
        model.forward = lambda x: block(x, scale=scale)  # type: ignore[method-assign]
        times = StepTimes(model, [block]) if watched else None
        for _ in range(3):
            model(torch.ones(4, 3)).square().sum().backward()
            if times is not None:
                times.end_update()
                times.end_step()
        costs = times and times.close()
        assert len(fired) == 3 or watched
        gradients = [p.grad for p in block.parameters() if p.grad is not None]
        return [*block.state_dict().values(), *gradients, torch.rand(2)], (
            costs.frozen_s[0] / costs.forward_s[0] if costs else 0.0
        )

    (seen, share), (alone, _) = train(True), train(False)
    assert all(torch.equal(one, other) for one, other in zip(seen, alone, strict=True))
    assert share == 1 if compiled else 0 < share <= 1


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_frozen_forward_that_is_shorter_counts_as_saved(
    monkeypatch: pytest.MonkeyPatch, evaluates: bool
) -> None:
    clock = [0.0]

    class Timed(nn.Module):
        """Take 4 s forward, 1 s without dropout, and 8 s backward."""

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
    assert costs == StepCosts(24.0, (4.0, 4.0), (8.0, 8.0), (0.0, 0.0), (1.0, 1.0))
    assert costs.saved_share(1, cached=False) == (4 + 8 - 1) / 24
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


def test_weights_that_move_are_measured_over_their_norm() -> None:
    layer = nn.Linear(2, 2, bias=False)
    fixed = nn.Linear(2, 2).requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    own = {"layer": dict(layer.named_parameters()), "fixed": dict(fixed.named_parameters())}
    changes = WeightChanges(own)
    changes.begin()
    with torch.no_grad():
        layer.weight += torch.tensor([[0.3, 0.0], [0.0, 0.4]])
    changes.begin()  # Goes on.
    assert changes.squares() == {"layer": pytest.approx([0.25, 25.0])}
    changes.reset()
    changes.begin()
    assert changes.squares()["layer"][0] == 0


@pytest.mark.parametrize("bad", [None, 0.0, float("nan"), float("inf")])
def test_what_is_not_measured_freezes_nothing(bad: float | None) -> None:
    context = make_context(epoch=10)
    updates = [1e-9, bad, 1e-9, 1e-9]
    layers = tuple(
        type(layer)(layer.name, layer.index, 1, None, update)
        for layer, update in zip(context.layers, updates, strict=False)
    )
    seen = type(context)(**{**vars(context), "layers": layers})
    decision = QuietUpdates().decide(seen)
    assert decision is not None and decision.num_frozen == 1


def test_a_low_learning_rate_does_not_look_like_convergence() -> None:
    context = make_context(epoch=10)
    layers = tuple(type(one)(one.name, one.index, 1, None, 5e-6) for one in context.layers)
    changed = {**vars(context), "layers": layers}
    high, low, zero = (type(context)(**{**changed, "learning_rate": r}) for r in (1e-3, 1e-4, 0.0))
    policy = QuietUpdates(1e-5)
    decided = [policy.decide(one) for one in (high, low, zero)]
    assert [one and one.num_frozen for one in decided] == [11, 0, None]


def test_the_advice_is_written_down_and_drawn(tmp_path: Path) -> None:
    costs = StepCosts(1.0, (0.1,) * 3, (0.2,) * 3, (0.01,) * 3, frozen_s=(0.04,) * 3)
    looks = (Look(100, 1, (1e-6, 2e-3, 1e-3), "r"), Look(200, 2, (None, 1e-6, 1e-3), "r"))
    advice = Advice(3, False, looks, costs)
    text = "layers 0-1 of 3 quiet since step 200: freezing them would save 54% of each step, 62%"
    assert str(advice) == f"{text} with a cache"
    advice.write(tmp_path)
    assert json.loads((tmp_path / "freeze_advice.json").read_text())["text"] == str(advice)
    assert (tmp_path / "freeze_advice.png").read_bytes().startswith(b"\x89PNG")
    assert "no layer is quiet by step 100" in str(Advice(3, False, (Look(100, 0, (), "r"),), None))
    assert str(Advice(0, False, (), None)) == "no advice yet: no interval is over"


def test_a_picture_that_cannot_be_drawn_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Advice(1, False, (Look(100, 1, (1e-6,), "r"),), None).write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["freeze_advice.json"]
    assert "freeze_advice.png is not drawn, as matplotlib is missing" in caplog.text


def resting(context: FreezeContext) -> FreezeDecision:
    return FreezeDecision(0, "as LISA does", (1,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Observer(every_steps=0), "every_steps is 0; give at least 1"),
        (lambda: Observer(layers=[]), "layers is empty; give the model's blocks"),
        (lambda: Observer(PaperRule(0.5)), "gradient_norm'\\], which are not measured here"),
        (lambda: Observer(FreezeOut()), "FreezeOut sets learning rates, which an advisor leaves"),
        (
            lambda: fit(Net(), Observer(resting, every_steps=1)),
            "resting lets layers \\(1,\\) rest",
        ),
        (lambda: QuietUpdates(0), "threshold is 0"),
        (lambda: QuietUpdates(begin=2), "begin is 2"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

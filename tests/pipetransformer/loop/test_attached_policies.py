"""A policy decides what a loop of one's own freezes, before each epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from freeze import FreezeContext, FreezePolicy, Linear, QuietUpdates
from pipetransformer import attach
from tests.helpers.any_models import KINDS, build, data, mean_loss, sgd
from tests.helpers.marks import slow
from tests.pipetransformer.loop.test_cached_loop import Samples

KIND = KINDS["gpt2_classifier"]
NUM_EPOCHS = 4


def run(freeze: Any, folder: Path, *, accumulates: int = 1) -> list[int]:
    """Train as a policy says; return what each epoch froze."""
    model = build(KIND)
    loader: DataLoader[Any] = DataLoader(Samples(dict(data(KIND).tensors)), batch_size=2)
    optimizer = sgd([*model.named_parameters()])
    schedule = LinearLR(optimizer, 1.0, 0.5, NUM_EPOCHS * 5)
    frozen: list[int] = []
    with attach(
        model, freeze=freeze, optimizer=optimizer, num_epochs=NUM_EPOCHS, cache_folder=folder
    ) as cached:
        for _ in range(NUM_EPOCHS):
            for number, batch in enumerate(cached.epoch(loader), 1):
                mean_loss(KIND, model, batch).backward()
                if number % accumulates == 0:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            frozen.append(cached.num_frozen)
            block = model.get_submodule(KIND.blocks)[0]  # type: ignore[index]
            assert all(p.requires_grad == (not frozen[-1]) for p in block.parameters())
        assert not frozen[-2] or cached.stats.hits + cached.stats.upgrades == len(loader.dataset)  # type: ignore[arg-type]
    return frozen


class Seen(FreezePolicy):
    """Note what it sees, and freeze one block more in each epoch, up to two."""

    signals = frozenset({"relative_update"})

    def __init__(self) -> None:
        self.contexts: list[FreezeContext] = []

    def decide(self, context: FreezeContext) -> Any:
        self.contexts.append(context)
        return None


@pytest.mark.parametrize(
    ("freeze", "expected"),
    [
        (lambda context: min(context.epoch, 2), [0, 1, 2, 2]),
        ("linear:0,0.75", [1, 1, 1, 2]),
        slow(Linear(begin=0.0, end=0.75), [1, 1, 1, 2]),
        slow("schedule:0,2,1", [0, 2, 1, 1]),
        (QuietUpdates(1e9, begin=0.25), [0, 2, 2, 2]),
    ],
)
def test_a_policy_is_asked_before_each_epoch(
    freeze: Any, expected: list[int], tmp_path: Path
) -> None:
    assert run(freeze, tmp_path) == expected


@pytest.mark.parametrize("accumulates", [1, 5])
def test_a_policy_sees_the_loop_s_steps_and_rates(accumulates: int, tmp_path: Path) -> None:
    policy = Seen()
    run(policy, tmp_path, accumulates=accumulates)
    per_epoch = 5 // accumulates
    contexts = policy.contexts
    assert [one.step for one in contexts] == [per_epoch * epoch for epoch in range(NUM_EPOCHS)]
    assert [one.epoch for one in contexts] == [*range(NUM_EPOCHS)]
    assert [one.max_steps for one in contexts[1:]] == [per_epoch * NUM_EPOCHS] * 3
    rates = [0.1 * (1 - 0.5 * one.step / (NUM_EPOCHS * 5)) for one in contexts]
    assert [one.learning_rate for one in contexts] == pytest.approx(rates)
    assert all(layer.relative_update for one in contexts[1:] for layer in one.layers)


def test_freeze_bottom_takes_the_policy_s_place(tmp_path: Path) -> None:
    model = build(KIND)
    loader: DataLoader[Any] = DataLoader(Samples(dict(data(KIND).tensors)), batch_size=5)
    optimizer = sgd([*model.named_parameters()])
    with attach(
        model, freeze=lambda _: 1, optimizer=optimizer, num_epochs=3, cache_folder=tmp_path
    ) as cached:
        frozen = []
        for _ in range(3):
            list(cached.epoch(loader))
            frozen.append(cached.num_frozen)
            cached.freeze_bottom(2)
    assert frozen == [1, 2, 2]
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("given", [{}, {"num_epochs": 3}, {"optimizer": None, "num_epochs": 0}])
def test_a_policy_without_what_it_needs_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Linear may look at what .* give attach optimizer=, and"):
        attach(build(KIND), freeze="linear", **given)


def test_a_signal_that_is_not_measured_in_a_loop_is_refused() -> None:
    model = build(KIND)
    optimizer = sgd([*model.named_parameters()])
    with pytest.raises(ValueError, match="asks for the signals .'gradient_norm'., which are not"):
        attach(model, freeze="paper:1/3", optimizer=optimizer, num_epochs=3)

"""Prove that a model is given back as it came: a second phase once trained a half of it.

Until `close` the frozen layers kept `requires_grad=False`, and their modules eval mode. Scripts
and notebooks have no `with`, and nothing said so.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from freeze import FreezeDecision
from pipetransformer import Trainer
from tests.helpers.loops import TINY, make_trainer
from tests.helpers.models import tiny_data, tiny_model

_EPOCHS = 2


def train_ours(model: nn.Module, *, freeze: Any = None, **settings: Any) -> Trainer:
    trainer = Trainer(
        model,
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=freeze,
        epochs=_EPOCHS,
        global_batch_size=8,
        **settings,
    )
    trainer.fit()
    return trainer


def first_phase(model: nn.Module) -> Trainer:
    """Train with layers frozen, and leave the trainer open."""
    trainer = train_ours(model, freeze=lambda context: 2 * (context.epoch > 0))
    assert trainer.decision is not None and trainer.decision.num_frozen == 2
    return trainer


def train_plainly(model: nn.Module) -> None:
    """Write the loop that does not know what has trained the model before."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for x, y in DataLoader(tiny_data(), batch_size=8):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_ours_after_ours_trains_as_on_a_fresh_copy() -> None:
    model = tiny_model()
    first = first_phase(model)
    fresh = tiny_model()
    fresh.load_state_dict(model.state_dict())
    second, other = train_ours(model), train_ours(fresh)
    assert_same(model, fresh)
    for trainer in (first, second, other):
        trainer.close()


def test_a_plain_loop_after_ours_trains_as_on_a_fresh_copy() -> None:
    model = tiny_model()
    first = first_phase(model)
    fresh = tiny_model()
    fresh.load_state_dict(model.state_dict())
    train_plainly(model)
    train_plainly(fresh)
    assert_same(model, fresh)
    first.close()


@pytest.mark.parametrize("training", [False, True])
def test_flags_modes_and_gradients_are_as_they_came(training: bool) -> None:
    model = tiny_model().train(training)
    head = list(model.parameters())[-1].requires_grad_(False)
    before = [(p, p.requires_grad) for p in model.parameters()]
    modes = {module: module.training for module in model.modules()}
    trainer = first_phase(model)
    for _ in range(2):
        assert [(p, p.requires_grad) for p in model.parameters()] == before
        assert {module: module.training for module in model.modules()} == modes
        assert all(p.grad is None for p in model.parameters())
        trainer.evaluate(tiny_data())
    trainer.close()
    assert not head.requires_grad
    assert {module: module.training for module in model.modules()} == modes


def test_a_run_whose_steps_are_taken_by_hand_gives_back_at_its_end() -> None:
    model = tiny_model()
    trainer = Trainer(
        model, tiny_data(), loss_fn=nn.CrossEntropyLoss(), freeze=lambda _: 2, global_batch_size=8
    )
    trainer.begin()
    while not trainer.is_over:
        trainer.step()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    trainer.close()


def test_a_run_that_is_left_gives_back() -> None:
    model = tiny_model().eval()
    trainer = Trainer(
        model, tiny_data(), loss_fn=nn.CrossEntropyLoss(), freeze=lambda _: 2, global_batch_size=8
    )
    trainer.step()
    assert not all(p.requires_grad for p in model.parameters())
    del trainer
    gc.collect()
    assert all(p.requires_grad for p in model.parameters())
    assert not any(module.training for module in model.modules())


def test_a_run_that_fails_gives_back() -> None:
    model = tiny_model()

    def freeze(context: Any) -> int:
        if context.epoch:
            raise ArithmeticError("no more")
        return 2

    with pytest.raises(Exception, match="no more"):
        train_ours(model, freeze=freeze)
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_an_open_run_has_is_refused() -> None:
    model = tiny_model()
    settings: Any = {"loss_fn": nn.CrossEntropyLoss(), "global_batch_size": 8}
    with Trainer(model, tiny_data(), **settings) as first:
        second = Trainer(model, tiny_data(), **settings)
        first.step()
        with pytest.raises(ValueError, match="another Trainer has this model"):
            Trainer(nn.Sequential(*model), tiny_data(), **settings)
        with pytest.raises(ValueError, match="another Trainer has this model"):
            second.step()
        first.fit()
        second.step()


def test_a_run_goes_on_with_what_was_frozen_after_its_model_was_used() -> None:
    def freeze(context: Any) -> int:
        return 2

    model, other = tiny_model(), tiny_model()
    settings: Any = {
        "loss_fn": nn.CrossEntropyLoss(), "freeze": freeze, "global_batch_size": 8, "epochs": 2
    }  # fmt: skip
    with (
        Trainer(model, tiny_data(), **settings) as one,
        Trainer(other, tiny_data(), **settings) as two,
    ):
        one.fit()
        for _ in range(two.max_steps):
            two.step()
            two.evaluate(Subset(tiny_data(), range(4)))
        assert_same(model, other)


def test_a_closed_trainer_says_so() -> None:
    trainer = first_phase(tiny_model())
    trainer.close()
    trainer.close()
    for use in (trainer.evaluate, trainer.predict):
        with pytest.raises(RuntimeError, match="the Trainer is closed"):
            use(tiny_data())


def test_a_decision_whose_reason_is_no_text_is_refused_where_it_is_made() -> None:
    with pytest.raises(TypeError, match="reason must be a text"):
        FreezeDecision(1, object())  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_trainable_what_was_before(fails: bool) -> None:
    # What it had frozen stayed so, and another Trainer took that for the user's wish: its layers
    # never trained, and nothing said so.
    model = tiny_model()
    model[2].requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with contextlib.suppress(KeyboardInterrupt):
        with make_trainer(replace(TINY, build=lambda: model, frozen=(2,))) as trainer:
            trainer.step()
            if fails:
                raise KeyboardInterrupt
            trainer.fit()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before

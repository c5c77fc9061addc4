"""Prove that modules train in the mode that is theirs, and that modes around a run are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.inspection import model_of
from tests.helpers.loops import TINY, make_trainer, train
from tests.helpers.models import Block, tiny_data
from tests.helpers.unusual import dropping


class Pinned(Block):
    """Keep dropout off, as `train()` of many models does for a part of them."""

    def train(self, mode: bool = True) -> Pinned:
        super().train(mode)
        self.dropout.eval()
        return self


def pinned() -> nn.Module:
    """Build a model that pins its dropout off."""
    model = dropping()
    for index in range(1, 5):
        block = Pinned(8, 0.5).double()
        block.load_state_dict(model[index].state_dict())  # type: ignore[index]
        model[index] = block  # type: ignore[index,operator]
    return model


def test_a_model_s_own_train_is_honoured() -> None:
    # Every module was put into training mode by itself, and the dropout went on.
    result, expected = train(replace(TINY, build=pinned)), train(TINY)
    assert result.losses == expected.losses


def shared_dropout() -> nn.Module:
    """Use one dropout module in a frozen and in an active layer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drop = nn.Dropout(0.5)
        layers = [nn.Sequential(nn.Linear(8, 8), drop) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3)).double()


def own_dropouts() -> nn.Module:
    """Use one each."""
    model = shared_dropout()
    for layer in list(model)[1:-1]:  # type: ignore[call-overload]
        layer[1] = nn.Dropout(0.5)
    return model


def test_a_module_of_a_frozen_and_an_active_layer_drops_in_the_active_one() -> None:
    # The frozen layer's pass put it into eval mode, also for the active one.
    job = replace(TINY, frozen=(2,))
    shared, own = (
        train(replace(job, build=shared_dropout)),
        train(replace(job, build=own_dropouts)),
    )
    assert shared.losses == own.losses


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    """Compute in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@pytest.mark.parametrize(
    ("surrounding", "message"),
    [
        (autocast, r"torch.autocast\('cpu'\) is on around the Trainer"),
        (torch.no_grad, r"torch.no_grad\(\) is on around the Trainer"),
        (torch.inference_mode, r"torch.inference_mode\(\) is on around the Trainer"),
    ],
)
def test_modes_that_would_freeze_the_weights_are_refused(surrounding: Any, message: str) -> None:
    # An autocast keeps its low-precision weights until it is left: every step trained with the
    # first step's, and the loss stayed where it was. Without gradients nothing trained at all.
    with make_trainer(TINY) as trainer:
        with surrounding(), pytest.raises(ValueError, match=message):
            trainer.fit()
        with surrounding(), pytest.raises(ValueError, match=message):
            trainer.step()
        assert trainer.global_step == 0
        with torch.no_grad():
            trainer.evaluate(tiny_data())
        trainer.fit()
    assert trainer.is_over


def test_the_mode_that_a_user_s_call_leaves_does_not_matter() -> None:
    # `model.train()` put dropout into the frozen layers, and what they gave was cached;
    # `model.eval()` took it from the others.
    def trained(disturb: bool) -> dict[str, Tensor]:
        job = replace(TINY, build=dropping, frozen=(2,))
        with make_trainer(job) as trainer:
            while not trainer.is_over:
                trainer.step()
                if disturb:
                    model_of(trainer).train(trainer.global_step % 2 == 0)
            return {name: t.clone() for name, t in trainer.state_dict().items()}

    undisturbed = trained(False)
    for name, tensor in trained(True).items():
        assert torch.equal(tensor, undisturbed[name]), name

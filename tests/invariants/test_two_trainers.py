"""Prove that Trainers which are closed in another order than they were opened leave all in order.

The first one made the process group; closing it took the second one's groups with it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from freeze import FreezeSchedule
from pipetransformer import Trainer, launch
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import suit_tests
from tests.helpers.scenario import Forced, Shape

NUM_BLOCKS = (4, 3)


def make(model: nn.Module, *, length: int, **settings: Any) -> Trainer:
    """Build a Trainer that freezes, reads ahead in a process, and evaluates."""
    return tiny_trainer(
        model,
        eval_dataset=tiny_data(),
        freeze=FreezeSchedule((0, 1)),
        plan=Forced({0: Shape(length, 2), 5: Shape(1, 2)}),
        epochs=2,
        global_batch_size=8,
        num_workers=1,
        **{"seed": 3, **settings},
    )


def numbers() -> list[float]:
    """Draw from the caller's random numbers."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def alone(num_blocks: int, length: int) -> dict[str, Any]:
    """Return the weights that a run by itself comes to; {} but on rank 0."""
    with make(tiny_model(num_blocks=num_blocks), length=length) as trainer:
        trainer.fit()
        return dict(trainer.state_dict())


def interleaved(length: int) -> list[dict[str, Any]]:
    """Train two models in turn, and close the first one before the second has come to its end."""
    models = [tiny_model(num_blocks=num) for num in NUM_BLOCKS]
    first, second = (make(model, length=length) for model in models)
    for _ in range(3):
        first.step()
        second.step()
    first.fit()
    weights = [dict(first.state_dict())]
    first.close()
    second.step()
    second.fit()
    second.evaluate()
    weights.append(dict(second.state_dict()))
    second.close()
    return weights


def over_one_model(length: int) -> dict[str, Any]:
    """Train a model by one Trainer and then by another, open when the first one closes."""
    model = tiny_model()
    first = make(model, length=length)
    first.fit()
    second = make(model, length=length, seed=4)
    second.step()
    first.close()
    assert [p.requires_grad for p in model[0].parameters()] == [True, True]
    second.fit()
    weights = dict(second.state_dict())
    second.close()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    return weights


def one_by_one(length: int) -> dict[str, Any]:
    """Train a model by one Trainer and then by another, which opens when the first has closed."""
    model = tiny_model()
    for seed in (3, 4):
        with make(model, length=length, seed=seed) as trainer:
            trainer.fit()
            weights = dict(trainer.state_dict())
    return weights


def assert_in_order(length: int) -> None:
    """Compare with runs by themselves; nothing of any run is left."""
    others = set(torch.multiprocessing.active_children())
    expected, own = [alone(num, length) for num in NUM_BLOCKS], one_by_one(length)
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(7)
    before = numbers()
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(7)
    found, again = interleaved(length), over_one_model(length)
    assert numbers() == before, "the caller's random numbers"
    assert not dist.is_initialized(), "groups"
    assert {*torch.multiprocessing.active_children()} <= others, "processes"
    for ours, theirs in zip([*found, again], [*expected, own], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_two_trainers_that_close_in_the_order_of_their_opening_do_not_touch_each_other() -> None:
    assert_in_order(1)


def on_two_ranks(lengths: tuple[int, ...]) -> None:
    suit_tests()
    for length in lengths:
        assert_in_order(length)


@pytest.mark.slow
def test_on_two_ranks_the_process_group_lives_as_long_as_any_of_its_trainers() -> None:
    launch(on_two_ranks, ((1, 2),), num_slots=2, start_method="forkserver")


def test_a_model_without_weights_on_rank_0_is_refused_by_name() -> None:
    model = tiny_model()
    model[2].to("meta")
    with make(model, length=1) as trainer:
        with pytest.raises(ValueError, match=r"sublayers \['2'\] have no weights on rank 0"):
            trainer.begin()

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
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import suit_tests
from tests.helpers.scenario import Forced, Shape

NUM_BLOCKS = (4, 3)


def make(model: nn.Module, *, length: int, num_workers: int, **settings: Any) -> Trainer:
    """Build a Trainer that freezes, reads ahead in a process if any, and evaluates."""
    return tiny_trainer(
        model,
        eval_dataset=tiny_data(),
        freeze=FreezeSchedule((0, 1)),
        plan=Forced({0: Shape(length, 2), 5: Shape(1, 2)}),
        epochs=2,
        global_batch_size=8,
        num_workers=num_workers,
        **{"seed": 3, **settings},
    )


def numbers() -> list[float]:
    """Draw from the caller's random numbers."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def alone(num_blocks: int, **how: int) -> dict[str, Any]:
    """Return the weights that a run by itself comes to; {} but on rank 0."""
    with make(tiny_model(num_blocks=num_blocks), **how) as trainer:
        trainer.fit()
        return dict(trainer.state_dict())


def interleaved(**how: int) -> list[dict[str, Any]]:
    """Train two models in turn, and close the first one before the second has come to its end."""
    models = [tiny_model(num_blocks=num) for num in NUM_BLOCKS]
    first, second = (make(model, **how) for model in models)
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


def over_one_model(**how: int) -> dict[str, Any]:
    """Train a model by one Trainer and then by another, open when the first one closes."""
    model = tiny_model()
    first = make(model, **how)
    first.fit()
    second = make(model, **how, seed=4)
    second.step()
    first.close()
    assert [p.requires_grad for p in model[0].parameters()] == [True, True]
    second.fit()
    weights = dict(second.state_dict())
    second.close()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    return weights


def one_by_one(**how: int) -> dict[str, Any]:
    """Train a model by one Trainer and then by another, which opens when the first has closed."""
    model = tiny_model()
    for seed in (3, 4):
        with make(model, **how, seed=seed) as trainer:
            trainer.fit()
            weights = dict(trainer.state_dict())
    return weights


def assert_in_order(**how: int) -> None:
    """Compare with runs by themselves; nothing of any run is left."""
    others = set(torch.multiprocessing.active_children())
    expected, own = [alone(num, **how) for num in NUM_BLOCKS], one_by_one(**how)
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(7)
    before = numbers()
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(7)
    found, again = interleaved(**how), over_one_model(**how)
    assert numbers() == before, "the caller's random numbers"
    assert not dist.is_initialized(), "groups"
    assert {*torch.multiprocessing.active_children()} <= others, "processes"
    for ours, theirs in zip([*found, again], [*expected, own], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("num_workers", [0, slow(1)])
def test_two_trainers_that_close_in_the_order_of_their_opening_do_not_touch_each_other(
    num_workers: int,
) -> None:
    assert_in_order(length=1, num_workers=num_workers)


def on_two_ranks(lengths: tuple[int, ...]) -> None:
    suit_tests()
    for length in lengths:
        assert_in_order(length=length, num_workers=1)


@pytest.mark.slow
def test_on_two_ranks_the_process_group_lives_as_long_as_any_of_its_trainers() -> None:
    launch(on_two_ranks, ((1, 2),), num_slots=2, start_method="forkserver")


def test_a_model_without_weights_on_rank_0_is_refused_by_name() -> None:
    model = tiny_model()
    model[2].to("meta")
    with make(model, length=1, num_workers=1) as trainer:
        with pytest.raises(ValueError, match=r"sublayers \['2'\] have no weights on rank 0"):
            trainer.begin()

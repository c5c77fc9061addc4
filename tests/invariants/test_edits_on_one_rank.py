"""Prove that weights which a script changed on one rank alone are refused on all of them.

Replicas drifted apart for good and nothing said so; a transition then spread whichever was nearer.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from freeze import FreezeSchedule
from tests.helpers.loops import TINY, Named, make_trainer
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.scenario import Forced, Shape
from tests.helpers.unusual import Layer, around

_HALF = 2
"""Steps done when the script writes, in an epoch of four."""


def train(
    edited: str, rank: int | None, *, lengths: dict[int, int], ends: str = "fit"
) -> tuple[str, list[float], dict[str, Any]]:
    """Write into a tensor in the middle of the second epoch; return error, losses and weights.

    Args:
        edited: the tensor's name.
        rank: on which alone; None for all.
        lengths: K by step.
        ends: what follows that: "fit" or "evaluate".
    """
    model, losses = tiny_model(), list[float]()
    with tiny_trainer(
        model,
        eval_dataset=tiny_data(),
        freeze=FreezeSchedule((0, 2, 2)),
        plan=Forced({step: Shape(length, 2) for step, length in lengths.items()}),
        epochs=3,
        global_batch_size=8,
        evaluate_every_epochs=0,
        freeze_interval_steps=1,
    ) as trainer:
        for _ in range(4 + _HALF):
            losses.append(trainer.step().loss)
        tensor = dict(model.named_parameters())[edited]
        if rank in (None, trainer.world.rank):
            with torch.no_grad():
                tensor.data.view(-1)[:1].add_(0.25)
        try:
            if ends == "evaluate":
                losses.append(trainer.evaluate()["loss"])
            while not trainer.is_over:
                losses.append(trainer.step().loss)
            trainer.fit()
        except ValueError as error:
            return str(error), losses, {}
        return "", losses, dict(trainer.state_dict())


FROZEN, TRAINED = "1.inner.weight", "3.inner.weight"


@pytest.mark.parametrize(
    ("edited", "rank"), [(FROZEN, 0), slow(TRAINED, 1), slow(FROZEN, 1), slow(TRAINED, 0)]
)
@pytest.mark.parametrize(
    ("lengths", "ends", "num_steps"),
    [({0: 1}, "evaluate", 6), ({0: 1}, "fit", 8), ({0: 1, 7: 2}, "fit", 7)],
    ids=["evaluation", "epoch", "transition"],
)
def test_replicas_that_one_rank_has_changed_are_refused_on_all(
    two_ranks: Pool, lengths: dict[int, int], ends: str, num_steps: int, edited: str, rank: int
) -> None:
    found = two_ranks.run(_train, edited, rank, lengths, ends)
    for error, losses, _ in found:
        assert (
            f"'{edited}' of sublayer" in error and "other values on rank 1 than on rank 0" in error
        )
        assert len(losses) == num_steps


def _train(edited: str, rank: int | None, lengths: dict[int, int], ends: str) -> Any:
    return train(edited, rank, lengths=lengths, ends=ends)


@functools.cache
def on_one(edited: str) -> tuple[str, list[float], dict[str, Any]]:
    """Train in this process alone."""
    return train(edited, None, lengths={0: 1})


@pytest.mark.parametrize("edited", [FROZEN, slow(TRAINED)])
@pytest.mark.parametrize("lengths", [slow({0: 1}), slow({0: 2}), {0: 2, 7: 1}], ids=str)
def test_weights_that_all_ranks_have_changed_train_as_on_one(
    two_ranks: Pool, lengths: dict[int, int], edited: str
) -> None:
    _, losses, weights = on_one(edited)
    (error, ours, found), _ = two_ranks.run(_train, edited, None, lengths, "fit")
    assert not error and ours == pytest.approx(losses, rel=1e-9)
    for name, tensor in weights.items():
        assert torch.allclose(found[name], tensor, rtol=1e-7, atol=1e-9), name


@pytest.mark.parametrize(("edited", "rank"), [slow(FROZEN, 0), ("5.1.weight", 1)])
def test_a_layer_that_only_one_rank_holds_may_be_changed_there_alone(
    two_ranks: Pool, edited: str, rank: int
) -> None:
    _, losses, _ = on_one(edited)
    (error, ours, _), _ = two_ranks.run(_train, edited, rank, {0: 2}, "fit")
    assert not error and ours == pytest.approx(losses, rel=1e-9)


def by_rank(setting: str) -> str:
    """Give each rank something of its own; return what is said."""
    rank = torch.distributed.get_rank()
    settings: dict[str, Any] = {**TINY.settings}
    job = TINY
    if setting == "seed":
        settings["seed"] = rank
    elif setting == "optimizer":
        job = replace(job, optimizer=functools.partial(own_sgd, 0.1 * (rank + 1)))
    elif setting == "data":
        job = replace(job, data=functools.partial(other_data, rank))
    elif setting == "length":
        job = replace(job, data=functools.partial(tiny_data, num_samples=26 + rank))
    elif setting == "attribute":
        job = replace(job, build=functools.partial(unregistered, rank))
    with make_trainer(replace(job, settings=settings)) as trainer:
        try:
            trainer.step()
        except ValueError as error:
            return str(error)
    return ""


def own_sgd(rate: float, named: Named) -> Optimizer:
    return SGD([p for _, p in named], lr=rate)


def other_data(rank: int) -> TensorDataset:
    x, y = tiny_data().tensors
    return TensorDataset(x.roll(rank, 0), y.roll(rank, 0))


def unregistered(rank: int) -> nn.Module:
    """Keep a random matrix that is no buffer."""
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(8, 8, dtype=torch.float64, generator=generator)
    return around(Layer(lambda layer, hidden: hidden @ layer.matrix, matrix=matrix))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed", "setting 'seed' differs from rank to rank (0, 1); give all ranks the same"),
        ("optimizer", "what optimizer= builds differs from rank to rank ("),
        ("data", "sample 0 of train_dataset differs from rank to rank ("),
        ("length", "the length of train_dataset differs from rank to rank (26, 27)"),
        ("attribute", "attribute 'matrix' of '1', which is not registered, differs from rank"),
    ],
)
def test_ranks_that_were_given_different_things_are_refused(
    two_ranks: Pool, setting: str, message: str
) -> None:
    # Samples were trained on twice or never, and replicas drifted apart (loss off by 0.4).
    for text in two_ranks.run(by_rank, setting):
        assert text.startswith(message)

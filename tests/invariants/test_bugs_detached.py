"""Refuse losses that teach nothing, and train on where single micro-batches do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.loss import Loss
from tests.invariants.test_bugs_numbers import TINY
from tests.loops import make_trainer
from tests.pool import Pool


def detached(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.detach(), target)


def train_detached(settings: dict[str, Any]) -> str:
    settings = {**TINY.settings, **settings}
    with make_trainer(replace(TINY, settings=settings, loss_fn=detached)) as trainer:
        with pytest.raises(ValueError) as refused:
            trainer.step()
    return str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_length": 1},
        {"pipeline_length": 2},
        {"pipeline_length": 2, "weight_versions": "stashed"},
    ],
    ids=["K = 1", "K = 2", "stream"],
)
def test_a_loss_without_a_gradient_is_refused(two_ranks: Pool, settings: dict[str, Any]) -> None:
    # The loss stood still, and nobody said why.
    for message in two_ranks.run(train_detached, settings):
        assert message.startswith("the loss 'detached' has no gradient by the model's output")


def of_class_1(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Learn of one class alone; without any there is nothing to learn from."""
    counts = target == 1
    if not counts.any():
        return torch.zeros((), dtype=output.dtype), counts.sum()
    return F.cross_entropy(output[counts], target[counts], reduction="sum"), counts.sum()


def train_on_few() -> list[float]:
    job = replace(TINY, loss_fn=Loss(of_class_1, is_exact=True))
    with make_trainer(job) as trainer:
        return [trainer.step().loss for _ in range(8)]


def test_micro_batches_without_anything_to_learn_from_train_on_any_replicas(
    two_ranks: Pool,
) -> None:
    expected = train_on_few()
    for losses in two_ranks.run(train_on_few):
        assert losses == pytest.approx(expected, rel=1e-9)

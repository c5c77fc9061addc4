"""Keep fixed bugs fixed, each with its story."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import (
    FreezeContext,
    FreezeSchedule,
    PipelinePlan,
    PlanSituation,
    Trainer,
    fastest_plan,
)
from tests.models import tiny_data, tiny_model
from tests.pool import Pool


def evaluate_one_example() -> dict[str, float]:
    """Evaluate fewer examples than there are replicas, before any training."""
    x, y = tiny_data().tensors
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        batch_size=8,
        length=1,
        progress=False,
    ) as trainer:
        return trainer.evaluate(TensorDataset(x[:1], y[:1]))


def test_a_replica_without_examples_takes_part_in_evaluation(four_ranks: Pool) -> None:
    # split() of an empty tensor yields one empty piece, which was cut into zero micro-batches; and
    # a trainer that had not trained yet had no stage to evaluate with.
    x, y = tiny_data().tensors
    expected = nn.functional.cross_entropy(tiny_model()(x[:1]), y[:1]).item()
    for metrics in four_ranks.run(evaluate_one_example):
        assert abs(metrics["loss"] - expected) < 1e-9
        assert metrics["accuracy"] in (0.0, 1.0)
    assert torch.isfinite(torch.tensor(expected))


def failing_policy(context: FreezeContext) -> None:
    """Fail after the first epoch."""
    if context.epoch:
        raise KeyError("no such layer")


def train_with_failing_policy() -> str:
    """Return what this rank hears of a policy that fails on rank 0."""
    with (
        pytest.raises((KeyError, RuntimeError)) as caught,
        Trainer(
            tiny_model(),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            batch_size=8,
            epochs=2,
            freeze=failing_policy,
            progress=False,
        ) as trainer,
    ):
        trainer.fit()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_policy_that_fails_on_rank_0_is_heard_of_on_every_rank(two_ranks: Pool) -> None:
    # Rank 0 raised and left; the others waited in the broadcast until its timeout.
    first, second = two_ranks.run(train_with_failing_policy)
    assert first == "KeyError: 'no such layer'"
    assert second.startswith("RuntimeError: rank 0 could not decide: KeyError")


def train_with_few_active_layers() -> int:
    """Freeze all but the head under a pipeline length of 2."""
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        batch_size=8,
        epochs=2,
        length=2,
        freeze=FreezeSchedule([0, 5]),
        progress=False,
    ) as trainer:
        trainer.fit()
        assert trainer.decision is not None
        return trainer.decision.plan.length


def test_a_set_length_gives_way_where_fewer_layers_are_active(two_ranks: Pool) -> None:
    # The planner found no pipeline of two stages over one layer, and the run died in its middle.
    assert two_ranks.run(train_with_few_active_layers) == [1, 1]


def plan_too_low(situation: PlanSituation) -> PipelinePlan:
    """Plan as if nothing were frozen."""
    request = dataclasses.replace(situation.request, num_frozen=0)
    return fastest_plan(dataclasses.replace(situation, request=request))


def test_a_plan_that_trains_frozen_layers_is_refused() -> None:
    # Its frozen layers ran twice, once in the prefix and once in the first stage.
    with (
        pytest.raises(ValueError, match=r"first boundary is 0, but with 2 frozen layers .* is 2"),
        Trainer(
            tiny_model(),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            progress=False,
            freeze=FreezeSchedule([2]),
            planner=plan_too_low,
        ) as trainer,
    ):
        trainer.fit()

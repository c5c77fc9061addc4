"""Keep fixed bugs fixed, each with its story."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import Trainer
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

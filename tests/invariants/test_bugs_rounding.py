"""Prove what `cache_dtype` rounds: activations where layers freeze, whoever keeps them.

Activations were rounded where rows were kept: whether they were was decided by how fast a disk
reads, so that clocks changed what was learned; and the evaluation of another data set than
`eval_dataset` saw others. Tokens that a first layer only hands on were rounded like activations:
beyond the 256th other words were trained.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import Trainer
from pipetransformer.measure import Measurements
from tests.measured import measuring, never
from tests.models import tiny_data, tiny_model

EPOCHS = 3


def slowly(*arguments: Any, **options: Any) -> Measurements:
    """Find that a cache is slower than computing."""
    measured = never(*arguments, **options)
    return dataclasses.replace(measured, cache_bytes_per_s=1.0)


def train(model: nn.Module, data: TensorDataset, **settings: Any) -> tuple[list[float], int]:
    """Train with one frozen layer; evaluate two data sets of the same samples, too."""
    found = []
    with Trainer(
        model,
        data,
        eval_dataset=data,
        loss_fn=nn.CrossEntropyLoss(),
        freeze=lambda context: 1,
        epochs=EPOCHS,
        global_batch_size=8,
        evaluate_every_epochs=0,
        **settings,
    ) as trainer:
        while not trainer.is_over:
            found.append(trainer.step().loss)
            if trainer.epoch.is_integer():
                found.append(trainer.evaluate()["loss"])
                other = trainer.evaluate(TensorDataset(*data.tensors))
                assert other["loss"] == pytest.approx(found[-1], rel=1e-12)
    return found, trainer.report.cache_hits


def test_rounding_does_not_depend_on_whether_rows_are_kept() -> None:
    with measuring(never):
        kept, num_hits = train(tiny_model(), tiny_data(), cache_dtype="float16")
        exact, _ = train(tiny_model(), tiny_data())
    with measuring(slowly):
        computed, no_hits = train(tiny_model(), tiny_data(), cache_dtype="float16")
    assert num_hits > 0 == no_hits
    assert kept == pytest.approx(computed, rel=1e-12)
    assert kept != pytest.approx(exact, rel=1e-6)


def test_tokens_that_a_frozen_layer_hands_on_are_not_rounded() -> None:
    num_words, generator = 5000, torch.Generator().manual_seed(1)
    tokens = torch.randint(num_words, (16, 4), generator=generator)
    data = TensorDataset(tokens, torch.randint(3, (16,), generator=generator))

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4, 3))
        words = nn.Embedding(num_words, 8)
        return nn.Sequential(nn.Identity(), words, nn.Tanh(), head).double()

    with measuring(never):
        rounded, num_hits = train(build(), data, cache_dtype="bfloat16")
        assert rounded == train(build(), data, cache=False)[0]
    assert num_hits > 0

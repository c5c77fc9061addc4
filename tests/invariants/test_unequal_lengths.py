"""Prove that samples padded batch by batch, by workers or not, train as in a plain loop."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from autodp.sampler import EpochSampler, shuffled, shuffled_by_length
from pipetransformer import FreezeSchedule, Trainer
from pipetransformer.optimizer import NamedParameters
from tests.pool import Pool
from tests.texts import pad_to_longest, plain_losses, sentences, tiny_bert

FROZEN = (0, 1, 2, 2)
BATCH = 6


def sgd(named: NamedParameters) -> Optimizer:
    return SGD([parameter for _, parameter in named], lr=0.2)


def train(settings: dict[str, Any]) -> tuple[list[float], int]:
    """Return the loss of every step, and how many samples were read from the cache."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    with Trainer(
        tiny_bert(),
        sentences(),
        eval_dataset=sentences(9),
        optimizer=sgd,
        freeze=FreezeSchedule(FROZEN),
        epochs=len(FROZEN),
        global_batch_size=BATCH,
        collate_fn=pad_to_longest,
        progress=False,
        **settings,
    ) as trainer:
        losses = []
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        return losses, trainer.report.cache_hits


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"cache": False},
        {"pipeline_length": 2, "micro_batches": 2},
        {"pipeline_length": 1},
        {"pipeline_length": 2, "micro_batches": 3, "cache_limit_bytes": 20_000},
        {"micro_batch_size": 2, "freeze_interval_steps": 3},
    ],
    ids=str,
)
def test_losses_are_those_of_a_plain_loop_that_pads_the_global_batch(
    two_ranks: Pool, settings: dict[str, Any], workers: int
) -> None:
    expected = plain_losses(tiny_bert(), sentences(), frozen=FROZEN, batch_size=BATCH)
    if "freeze_interval_steps" in settings:
        settings = {**settings, "freeze_interval_steps": 4}
    results = two_ranks.run(train, {**settings, "num_workers": workers})
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=1e-9, rel=1e-7)
    if settings.get("cache", True):
        assert max(hits for _, hits in results) > 0


def test_a_batch_has_samples_of_about_equal_lengths_where_that_is_asked_for() -> None:
    lengths = torch.tensor([len(row["input_ids"]) for row in sentences(200)])
    usual = EpochSampler(200, shuffled(200, seed=0))
    grouped = EpochSampler(200, shuffled_by_length(lengths, seed=0, batch_size=2))
    for epoch in range(2):
        order = grouped.global_batch(epoch, 0, 200)
        assert sorted(order.tolist()) == list(range(200))
        assert set(order[:100].tolist()) == set(usual.global_batch(epoch, 0, 100).tolist())
        for pool in lengths[order].split(100):
            assert torch.equal(pool, pool.sort(descending=True).values)
    with Trainer(
        tiny_bert(),
        sentences(),
        optimizer=sgd,
        global_batch_size=BATCH,
        collate_fn=pad_to_longest,
        group_by_length=True,
        progress=False,
    ) as trainer:
        first, _ = trainer._run.batches()
    longest = max(len(row["input_ids"]) for row in sentences())
    assert len(sentences()[int(first[0])]["input_ids"]) == longest


def test_a_cache_without_a_mask_for_unequal_lengths_is_not_made_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without_mask(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = pad_to_longest(items)
        del batch["attention_mask"]
        return batch

    with Trainer(
        tiny_bert(),
        sentences(),
        optimizer=sgd,
        freeze=FreezeSchedule((1,)),
        epochs=3,
        global_batch_size=BATCH,
        collate_fn=without_mask,
        progress=False,
    ) as trainer:
        trainer.fit()
        assert trainer.report.cache_hits == 0
    assert "no cache: samples have unequal shapes of ['input_ids']" in caplog.text

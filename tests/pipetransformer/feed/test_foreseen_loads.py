"""Prove that workers foresee what steps will lack, while layers freeze and rows are checked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from freeze import FreezeContext, FreezeDecision
from pipetransformer import Trainer
from pipetransformer.feed.workers import ForeseenSamples
from tests.models import tiny_data, tiny_model

NUM_SAMPLES = 60
EPOCHS = 6


@pytest.mark.parametrize(
    ("global_batch_size", "settings", "frozen"),
    [
        (10, {}, {0: 2}),
        (7, {}, {0: 0, 9: 2}),
        (8, {"cache_limit_bytes": 20_000}, {0: 2}),
        (10, {"prefix_chunk": 16}, {0: 0, 2: 1, 4: 2, 9: 3}),
    ],
)
def test_workers_begin_anew_once_an_epoch_at_most(
    global_batch_size: int,
    settings: dict[str, Any],
    frozen: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    begin = ForeseenSamples._begin

    def counted(samples: ForeseenSamples) -> None:
        begun.append(trainer.global_step)
        begin(samples)

    def freeze(context: FreezeContext) -> FreezeDecision:
        latest = max(step for step in frozen if step <= context.step)
        return FreezeDecision(frozen[latest], "by step")

    monkeypatch.setattr(ForeseenSamples, "_begin", counted)
    with Trainer(
        tiny_model(),
        tiny_data(num_samples=NUM_SAMPLES),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=freeze,
        freeze_interval_steps=1,
        epochs=EPOCHS,
        global_batch_size=global_batch_size,
        num_workers=1,
        progress=False,
        **settings,
    ) as trainer:
        trainer.fit()
        report = trainer.report
    assert report.cache_hits
    per_epoch = -(-NUM_SAMPLES // global_batch_size)
    by_epoch = [sum(step // per_epoch == epoch for step in begun) for epoch in range(EPOCHS)]
    changes = [sum(step // per_epoch == epoch for step in frozen) for epoch in range(EPOCHS)]
    assert all(num <= 1 + more for num, more in zip(by_epoch, changes, strict=True)), begun

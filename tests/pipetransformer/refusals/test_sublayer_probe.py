"""Prove that a run says once when its random numbers depend on the pipelines it takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

from pipetransformer import Trainer
from tests.models import tiny_data, tiny_model
from tests.pool import Pool


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def warnings_of(dropout: float, settings: dict[str, Any]) -> list[str]:
    """Train a little; return what this rank has said of random numbers."""
    logger, heard = logging.getLogger("pipetransformer"), _Heard()
    logger.addHandler(heard)
    try:
        with Trainer(
            tiny_model(dropout=dropout),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            global_batch_size=6,
            progress=False,
            **settings,
        ) as trainer:
            trainer.step()
            trainer.step()
    finally:
        logger.removeHandler(heard)
    return [message for message in heard.messages if "draws random numbers" in message]


@pytest.mark.parametrize(
    ("dropout", "settings", "expected"),
    [
        (0.3, {}, 1),
        (0.0, {}, 0),
        (0.3, {"micro_batch_size": 2}, 0),
        (0.3, {"pipeline_length": 2, "micro_batches": 2}, 0),
    ],
    ids=str,
)
def test_random_numbers_that_follow_from_the_pipelines_are_said_once_by_rank_0(
    two_ranks: Pool, dropout: float, settings: dict[str, Any], expected: int
) -> None:
    first, second = two_ranks.run(warnings_of, dropout, settings)
    assert (len(first), second) == (expected, [])
    assert all("'1' draws" in message and "micro_batch_size=" in message for message in first)

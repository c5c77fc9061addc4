"""Prove what two samples tell of a model and its data before the first step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool


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
        with tiny_trainer(tiny_model(dropout=dropout), global_batch_size=6, **settings) as trainer:
            trainer.step()
            trainer.step()
    finally:
        logger.removeHandler(heard)
    return [message for message in heard.messages if "draws random numbers" in message]


@pytest.mark.parametrize(
    ("dropout", "settings", "expected"),
    [
        (0.3, {}, 1),
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
    assert all(m.startswith("dropout ('1.dropout', p=0.3) draws random") for m in first)
    assert all("micro_batch_size=" in message for message in first)


def test_a_batch_larger_than_the_training_set_is_worth_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for size, expected in ((1000, 1), (26, 0)):
        caplog.clear()
        begun(tiny_model(), tiny_data(), global_batch_size=size)
        said = [
            m for m in caplog.messages if m.startswith(f"global_batch_size is {size}, but the")
        ]
        assert len(said) == expected
        assert all("training set has 26 samples: an epoch is one step" in m for m in said)


class Absent(nn.Module):
    """Look up what is not there."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + {}["bias"]


def begun(model: nn.Module, data: TensorDataset, **settings: Any) -> None:
    """Begin a run."""
    loss_fn = nn.CrossEntropyLoss()
    with Trainer(model, data, loss_fn=loss_fn, progress=False, **settings) as trainer:
        trainer.begin()


def of_width(width: int) -> TensorDataset:
    """Return samples of so many features."""
    return TensorDataset(torch.randn(8, width, dtype=torch.float64), torch.zeros(8).long())


def test_a_sublayer_that_fails_is_named_with_what_it_got() -> None:
    wide = r"sublayer '0' fails for the input .*\(2, 9\) float64.*: mat1 and mat2 "
    with pytest.raises(RuntimeError, match=wide) as caught:
        begun(tiny_model(), of_width(9))
    assert isinstance(caught.value.__cause__, RuntimeError)
    failing = tiny_model()
    failing[2] = Absent()
    with pytest.raises(RuntimeError, match=r"'2' fails for the input \(2, 8\) float64: 'bias'"):
        begun(failing, tiny_data())


@pytest.mark.parametrize(
    ("eval_dataset", "message"),
    [
        (of_width(9), r"cannot be evaluated: sublayer '0' fails for the input .*\(2, 9\)"),
        (TensorDataset(tiny_data().tensors[0]), "cannot be evaluated: sample 0 is a tuple"),
        (TensorDataset(of_width(8).tensors[0], torch.full((8,), 7)), "Target 7 is out of bounds"),
    ],
    ids=["shape", "no targets", "class"],
)
def test_a_wrong_eval_dataset_is_refused_before_the_first_step(
    eval_dataset: TensorDataset, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begun(tiny_model(), tiny_data(), eval_dataset=eval_dataset)
    begun(tiny_model(), tiny_data(), eval_dataset=eval_dataset, evaluate_every_epochs=0)


@pytest.mark.parametrize(("views", "count"), [(2, 1), (1, 0)])
def test_as_many_views_as_epochs_are_warned_of(
    views: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {
        "epochs": 2,
        "cache_views": views,
        "freeze": FreezeSchedule((0, 1)),
    }
    with tiny_trainer(**settings) as trainer:
        trainer.begin()
    assert caplog.text.count("no row is read again") == count

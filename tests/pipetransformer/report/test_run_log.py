"""Prove that progress ends with the last evaluation."""

from __future__ import annotations

import re

import pytest
from torch import nn

from pipetransformer import Trainer
from tests.models import tiny_data, tiny_model


def test_the_bar_ends_with_the_accuracy_of_the_last_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Trainer(
        tiny_model(),
        tiny_data(),
        eval_dataset=tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        epochs=2,
        global_batch_size=6,
    ) as trainer:
        report = trainer.fit()
    shown = re.findall(r"acc=([^,]+),", capsys.readouterr().err)
    assert shown[-1] == f"{report.metrics['accuracy']:.3f}"

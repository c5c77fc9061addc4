"""Test the benchmarks of freezing: what they print and prove, but no speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from experiments.benchmarks import predicted_savings, signals
from experiments.benchmarks.measuring.rounds import ResultsDifferError
from experiments.benchmarks.measuring.timed_loop import RivalTask, Sentences, sentences_task


def tiny_task() -> RivalTask:
    """Return sentences for a BERT of three narrow layers."""

    def build() -> BertForSequenceClassification:
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(
                hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
            )
        )

    task = sentences_task(Sentences())
    few = torch.utils.data.Subset(task.dataset, range(16))  # type: ignore[arg-type]
    return replace(task, num_layers=3, build=build, dataset=few, batch_size=4)


def test_a_signal_s_cost_is_told_apart_from_its_decision_s() -> None:
    plain = np.array([0.2, 0.1, 0.1, 0.1] * 3)
    seconds = {signals.NONE: plain, "one": 1.01 * plain + np.array([0.05, 0, 0, 0] * 3)}
    cost = signals.cost_of(seconds, "one", steps_per_epoch=4)
    assert cost.per_step == pytest.approx(0.01)
    # The decision's step is longer for both, of which 1 % is the signal's, too.
    assert cost.decision_s == pytest.approx(0.05 + 0.002 - 0.001)
    assert cost.share == pytest.approx(0.01 + 0.051 / 0.4)


@pytest.mark.slow
def test_every_signal_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    found = signals.measure(tiny_task(), epochs=1)
    assert set(found) == {"step_ms", *signals.SIGNALS} - {signals.NONE}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found) - 1


def test_signals_that_change_the_loss_are_found() -> None:
    class Fake:
        def __init__(self, loss: float) -> None:
            self.loss = loss

        def step(self) -> Fake:
            return self

    with pytest.raises(ResultsDifferError, match="signals change what is learned"):
        signals.verify_losses({"one": Fake(1.0), "other": Fake(2.0)})  # type: ignore[dict-item]


@pytest.mark.slow
def test_a_callback_s_prediction_stands_beside_what_was_saved(tmp_path: Path) -> None:
    outcomes = predicted_savings.run(tiny_task(), 1, str(tmp_path))
    for outcome in outcomes.values():
        assert 0 < outcome.predicted < 1 and outcome.saved < 1
    assert outcomes[False].predicted < outcomes[True].predicted

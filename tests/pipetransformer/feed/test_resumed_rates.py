"""Prove that a run that goes on in other batches trains at the rates that its samples say."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from pipetransformer import Trainer, adamw
from pipetransformer.report import RECORDS_FILE, read_records
from tests.models import tiny_data, tiny_model


# From the resume on it trained at a rate of 0, as epochs=3 and max_steps=1000 were both set.
@pytest.mark.parametrize(("batch", "other"), [(4, 8), (8, 4)])
def test_rates_go_on_from_where_they_were_with_epochs_and_max_steps(
    tmp_path: Path, batch: int, other: int
) -> None:
    for size in (batch, other):
        with Trainer(
            tiny_model(),
            tiny_data(num_samples=16),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=adamw(1e-3),
            learning_rate_schedule="linear",
            epochs=4,
            max_steps=1000,
            global_batch_size=size,
            folder=tmp_path,
            checkpoint_every_steps=1,
            resume="auto",
            progress=False,
        ) as trainer:
            if size == other:
                trainer.fit()
            else:  # One epoch and a half of four.
                for _ in range(24 // size):
                    trainer.step()
    steps = [one for one in read_records(tmp_path / RECORDS_FILE) if one["kind"] == "step"]
    done, expected = 0, []
    for one in steps:
        expected.append(1e-3 * (1 - done / 64))
        done += one["samples"]
    assert done == 64
    assert [one["learning_rate"] for one in steps] == pytest.approx(expected, rel=1e-9)

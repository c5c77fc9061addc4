"""Prove that a report's figures are the whole run's on every rank, also once it was resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pipetransformer import FitReport, FreezeSchedule, Trainer
from pipetransformer.report import RECORDS_FILE, read_records
from tests.measured import measuring, never
from tests.models import NUM_SAMPLES, tiny_data, tiny_model
from tests.pool import Pool

EPOCHS = 3


def train(folder: str | None, steps: int | None, settings: dict[str, Any]) -> FitReport:
    """Train with two layers frozen and cached, to the end or for so many steps."""
    saved = {} if folder is None else {"checkpoint_every_steps": 1, "resume": "auto"}
    with (
        measuring(never),
        Trainer(
            tiny_model(),
            tiny_data(),
            loss_fn=nn.CrossEntropyLoss(),
            freeze=FreezeSchedule([2]),
            epochs=EPOCHS,
            global_batch_size=8,
            prefix_chunk=1,  # So that no row is computed before its step.
            evaluate_every_epochs=0,
            folder=folder,
            progress=False,
            **saved,
            **settings,
        ) as trainer,
    ):
        for _ in range(steps or 0):
            trainer.step()
        return trainer.report if steps else trainer.fit()


def figures(report: FitReport) -> tuple[int, int, int]:
    return report.samples, report.cache_hits, report.cache_misses


# Each rank counted its own hits beside the samples of all; a resume gave rank 0's to all.
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_length": 1},
        {"pipeline_length": 2},
        {"pipeline_length": 2, "weight_versions": "stashed"},
        {"stage_workers": (1, 1)},
    ],
    ids=str,
)
def test_hits_and_misses_are_those_of_all_ranks_at_every_moment(
    two_ranks: Pool, tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole = (EPOCHS * NUM_SAMPLES, 2 * NUM_SAMPLES, NUM_SAMPLES)
    for report in two_ranks.run(train, None, None, settings):
        assert figures(report) == whole
    # Step 6 is the second of the second epoch, in which all is read.
    folder = str(tmp_path)
    for report in two_ranks.run(train, folder, 6, settings):
        assert figures(report) == (NUM_SAMPLES + 16, 16, NUM_SAMPLES)
    # Rows were the first run's: 10 samples are left of this epoch, and are all that is read later.
    for report in two_ranks.run(train, folder, None, settings):
        samples, hits, misses = figures(report)
        assert samples == hits + misses == EPOCHS * NUM_SAMPLES
        assert (hits, misses) == (16 + 10, 2 * NUM_SAMPLES)
    steps = [one for one in read_records(tmp_path / RECORDS_FILE) if one["kind"] == "step"]
    assert [one["cache_hits"] + one["cache_misses"] for one in steps] == [8, 8, 8, 2] * EPOCHS


def test_replicas_agree_on_every_figure_but_their_own_seconds_and_bytes(two_ranks: Pool) -> None:
    one, other = (vars(r) for r in two_ranks.run(train, None, None, {"pipeline_length": 1}))
    assert {name for name in one if one[name] != other[name]} <= {"seconds"}

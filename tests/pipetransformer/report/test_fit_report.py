"""Prove that a report's figures are the whole run's on every rank, also once it was resumed."""

from __future__ import annotations

import re
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


def test_a_report_prints_as_a_table_with_the_training_loss_and_k_by_r() -> None:
    shape: dict[str, Any] = {"frozen": 2, "length": 2, "replicas": 1}
    report = FitReport(
        seconds=1.25,
        samples=64,
        cache_hits=20,
        cache_misses=12,
        metrics={"loss": 0.5, "accuracy": 0.9531},
        evaluated_at=8,
        best_metric=0.5,
        best_step=8,
        training_loss=0.26631,
        **shape,
        transitions=[{"step": 4, **shape, "micro_batches": 3, "seconds": 0.1}],
    )
    assert [re.split("  +", line) for line in str(report).splitlines()] == [
        ["training loss", "0.2663"],
        ["loss", "0.5, evaluated after step 8"],
        ["accuracy", "0.9531, evaluated after step 8"],
        ["best metric", "0.5, after step 8"],
        ["seconds", "1.25"],
        ["samples", "64"],
        ["frozen layers' outputs", "20 samples read, 12 computed"],
        ["frozen layers", "2"],
        ["K x R", "2 x 1"],
        [""],
        ["transition", "frozen layers", "K x R", "M", "seconds"],
        ["step 4", "2", "2 x 1", "3", "0.1"],
    ]
    assert repr(report).startswith("FitReport(seconds=1.25, samples=64, cache_hits=20")


def test_a_report_tells_the_last_epoch_s_loss_and_the_last_step_s_pipeline(
    two_ranks: Pool, tmp_path: Path
) -> None:
    settings = {"pipeline_length": 2}
    two_ranks.run(train, str(tmp_path), 6, settings)
    first, second = two_ranks.run(train, str(tmp_path), None, settings)
    assert first.training_loss == second.training_loss
    *_, epoch = [r for r in read_records(tmp_path / RECORDS_FILE) if r["kind"] == "epoch"]
    assert first.training_loss == epoch["loss"]
    assert (first.frozen, first.length, first.replicas) == (2, 2, 1)

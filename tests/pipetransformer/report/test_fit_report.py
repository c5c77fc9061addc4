"""Prove that a report's figures are the whole run's on every rank, also once it was resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from experiments.finetune.finished_run import learning_of
from freeze import FreezeContext, FreezeSchedule, Linear
from pipetransformer import FitReport, Trainer
from pipetransformer.report import RECORDS_FILE, latest_branch, read_records
from pipetransformer.report.records import epochs_of
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool

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
        slow({"pipeline_length": 2}),
        slow({"pipeline_length": 2, "weight_versions": "stashed"}),
        slow({"stage_workers": (1, 1)}),
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
    reports = two_ranks.run(train, folder, None, settings)
    records = read_records(tmp_path / RECORDS_FILE)
    *_, epoch = [one for one in records if one["kind"] == "epoch"]
    for report in reports:
        samples, hits, misses = figures(report)
        assert samples == hits + misses == EPOCHS * NUM_SAMPLES
        assert (hits, misses) == (16 + 10, 2 * NUM_SAMPLES)
        assert (report.training_loss, report.frozen) == (epoch["loss"], 2)
        assert report.length == settings.get("pipeline_length", 2)
    steps = [one for one in records if one["kind"] == "step"]
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


def train_watched(folder: Path, num_steps: int | None = None, **settings: Any) -> float:
    """Train to the end, or so many steps and then stop without it; return the report's seconds."""
    usual: dict[str, Any] = {
        "freeze": Linear(),
        "signals": ["probe_cka"],
        "freeze_interval_steps": 3,
        "global_batch_size": 6,
    }
    with tiny_trainer(eval_dataset=tiny_data(), folder=folder, **{**usual, **settings}) as trainer:
        if num_steps is None:
            return trainer.fit().seconds
        for _ in range(num_steps):
            trainer.step()
        return trainer.report.seconds


def assert_all_are(seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Hold the sums of the records against a report's seconds; return the epochs' records."""
    records = latest_branch(read_records(folder / "records.jsonl"))
    parts = [one["breakdown"] for one in epochs_of(records)]
    assert sum(sum(part.values()) for part in parts) == pytest.approx(seconds, rel=1e-6)
    *_, (learned_s, _) = learning_of(records, "accuracy")
    assert learned_s == pytest.approx(seconds, rel=1e-6)
    return [one for one in records if one["kind"] == "epoch"]


def test_a_run_that_ends_within_an_epoch_and_looks_at_layers_is_counted_whole(
    tmp_path: Path,
) -> None:
    whole, part = assert_all_are(train_watched(tmp_path, max_steps=6, epochs=3), tmp_path)
    assert (whole["epoch"], part["epoch"]) == (1, 2)
    assert part["partial"] and "partial" not in whole


def test_what_a_kill_has_discarded_is_counted_nowhere(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 3, "checkpoint_every_steps": 5}
    train_watched(tmp_path, num_steps=8, **settings)
    epochs = assert_all_are(train_watched(tmp_path, resume="auto", **settings), tmp_path)
    assert [one["epoch"] for one in epochs] == [1, 2, 3]


def test_what_a_run_that_froze_nothing_took_to_decide_is_no_transition(tmp_path: Path) -> None:
    # Half of it was shown as transitions: what looking at the probe took, and deciding to go on.
    def never(context: FreezeContext) -> int:
        return 0

    epochs = assert_all_are(train_watched(tmp_path, freeze=never, epochs=3), tmp_path)
    assert all(one["breakdown"]["transition"] == 0.0 for one in epochs)
    assert all(one["breakdown"]["deciding"] > 0.0 for one in epochs)


def test_a_transition_is_what_was_carried_out(tmp_path: Path) -> None:
    train_watched(tmp_path, freeze=FreezeSchedule([0, 2]), epochs=3, freeze_interval_steps=None)
    records = read_records(tmp_path / "records.jsonl")
    seconds = [one["seconds"] for one in records if one["kind"] == "transition" and one["step"]]
    assert len(seconds) == 1
    parts = [one["breakdown"]["transition"] for one in epochs_of(records)]
    assert sum(parts) == pytest.approx(seconds[0])

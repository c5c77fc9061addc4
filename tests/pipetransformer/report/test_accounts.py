"""A run's seconds are the same in its report, in its records and in the table of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from experiments.finetune.finished_run import learning_of
from freeze import FreezeContext, FreezeSchedule, Linear
from pipetransformer import Trainer
from pipetransformer.report import latest_branch, read_records
from pipetransformer.report.pictures import total_breakdown
from tests.models import tiny_data, tiny_model


def train(folder: Path, num_steps: int | None = None, **settings: Any) -> float:
    """Train to the end, or so many steps and then stop without it; return the report's seconds."""
    usual: dict[str, Any] = {
        "freeze": Linear(),
        "signals": ["probe_cka"],
        "freeze_interval_steps": 3,
        "global_batch_size": 6,
    }
    with Trainer(
        tiny_model(),
        tiny_data(),
        eval_dataset=tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        folder=folder,
        progress=False,
        **{**usual, **settings},
    ) as trainer:
        if num_steps is None:
            return trainer.fit().seconds
        for _ in range(num_steps):
            trainer.step()
        return trainer.report.seconds


def assert_all_are(seconds: float, folder: Path) -> list[dict[str, Any]]:
    """Hold the sums of the records against a report's seconds; return the epochs' records."""
    records = latest_branch(read_records(folder / "records.jsonl"))
    assert sum(total_breakdown(records).values()) == pytest.approx(seconds, rel=1e-6)
    *_, (learned_s, _) = learning_of(records, "accuracy")
    assert learned_s == pytest.approx(seconds, rel=1e-6)
    return [one for one in records if one["kind"] == "epoch"]


def test_a_run_that_ends_within_an_epoch_and_looks_at_layers_is_counted_whole(
    tmp_path: Path,
) -> None:
    whole, part = assert_all_are(train(tmp_path, max_steps=6, epochs=3), tmp_path)
    assert (whole["epoch"], part["epoch"]) == (1, 2)
    assert part["partial"] and "partial" not in whole


def test_what_a_kill_has_discarded_is_counted_nowhere(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 3, "checkpoint_every_steps": 5}
    train(tmp_path, num_steps=8, **settings)
    epochs = assert_all_are(train(tmp_path, resume="auto", **settings), tmp_path)
    assert [one["epoch"] for one in epochs] == [1, 2, 3]


def test_what_a_run_that_froze_nothing_took_to_decide_is_no_transition(tmp_path: Path) -> None:
    # Half of it was shown as transitions: what looking at the probe took, and deciding to go on.
    def never(context: FreezeContext) -> int:
        return 0

    epochs = assert_all_are(train(tmp_path, freeze=never, epochs=3), tmp_path)
    assert all(one["breakdown"]["transition"] == 0.0 for one in epochs)
    assert all(one["breakdown"]["deciding"] > 0.0 for one in epochs)


def test_a_transition_is_what_was_carried_out(tmp_path: Path) -> None:
    train(tmp_path, freeze=FreezeSchedule([0, 2]), epochs=3, freeze_interval_steps=None)
    records = read_records(tmp_path / "records.jsonl")
    seconds = [one["seconds"] for one in records if one["kind"] == "transition" and one["step"]]
    assert len(seconds) == 1
    assert total_breakdown(records)["transition"] == pytest.approx(seconds[0])

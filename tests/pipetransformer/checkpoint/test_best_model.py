"""Prove which evaluation counts as the best, whose weights a run ends with, and when it ends."""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

from pipetransformer import CorruptCheckpointError, EvalPrediction
from pipetransformer.checkpoint import best_model
from pipetransformer.checkpoint.best_model import BestModel
from pipetransformer.checks.run_checks import check_selection
from pipetransformer.config import TrainConfig
from tests.helpers.checkpoints import State, copied, fit_with_marks, stop_after, trainer_of
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool


def noted(values: Sequence[float], **settings: Any) -> list[tuple[bool, bool]]:
    """Note values at steps 1, 2, ...; say of each whether it was the best and ended patience."""
    name = settings.get("metric_for_best_model", "loss")
    best = BestModel(TrainConfig(**settings))
    return [
        (best.note({name: value}, step), best.is_out_of_patience)
        for step, value in enumerate(values, start=1)
    ]


def bests(values: Sequence[float], **settings: Any) -> list[bool]:
    return [is_best for is_best, _ in noted(values, **settings)]


@pytest.mark.parametrize(
    ("metric", "greater_is_better", "expected"),
    [
        ("loss", None, [True, True, False]),
        ("token_loss", None, [True, True, False]),
        ("f1", None, [True, False, True]),
        ("loss", True, [True, False, True]),
        ("f1", False, [True, True, False]),
    ],
)
def test_less_loss_and_more_of_another_metric_is_better(
    metric: str, greater_is_better: bool | None, expected: list[bool]
) -> None:
    settings = {"metric_for_best_model": metric, "greater_is_better": greater_is_better}
    assert bests([2.0, 1.0, 3.0], **settings) == expected


def test_an_equal_value_and_none_at_all_are_no_better() -> None:
    assert bests([1.0, 1.0, math.nan, 0.5]) == [True, False, False, True]
    assert bests([math.nan, 1.0]) == [False, True]


def test_patience_counts_evaluations_in_a_row_without_improvement() -> None:
    ends = [ends for _, ends in noted([3, 4, 2, 3, 3, 1], early_stopping_patience=2)]
    assert ends == [False, False, False, False, True, False]


def test_a_gain_within_the_threshold_is_the_best_and_no_improvement() -> None:
    settings = {"early_stopping_patience": 2, "early_stopping_threshold": 0.5}
    assert noted([3.0, 2.9, 2.0, 1.6, 1.5], **settings) == [
        (True, False),
        (True, False),
        (True, False),
        (True, False),
        (True, True),
    ]


def test_a_metric_that_is_not_there_is_refused_with_those_that_are() -> None:
    best = BestModel(TrainConfig(metric_for_best_model="f1"))
    message = r"metric_for_best_model is 'f1', but an evaluation has accuracy, loss; choose one"
    with pytest.raises(ValueError, match=message):
        best.note({"loss": 1.0, "accuracy": 0.5}, 3)


@pytest.mark.parametrize(
    ("settings", "has_eval_dataset", "message"),
    [
        ({"early_stopping_patience": 1}, False, "early_stopping_patience needs .* no eval_data"),
        ({"evaluate_every_steps": 1}, False, "evaluate_every_steps needs .* no eval_dataset"),
        (
            {"load_best_model_at_end": True, "folder": "run"},
            False,
            "load_best_model_at_end needs evaluations, but there is no eval_dataset",
        ),
        ({"load_best_model_at_end": True}, True, "needs a folder to keep the best weights in"),
        (
            {"early_stopping_patience": 1, "evaluate_every_epochs": 0},
            True,
            "early_stopping_patience needs evaluations, and none is due",
        ),
    ],
)
def test_what_judges_by_evaluations_is_refused_without_any(
    settings: dict[str, Any], has_eval_dataset: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_selection(TrainConfig(**settings), has_eval_dataset=has_eval_dataset)


def after(num_steps: int, folder: Path) -> State:
    """Return rank 0's weights after so many steps."""
    with trainer_of(folder) as trainer:
        for _ in range(num_steps):
            trainer.step()
        return copied(trainer)


def assert_equal(found: State, expected: State) -> None:
    """Compare every tensor: K and M may have been chosen anew, so that last bits differ."""
    assert found.keys() == expected.keys() and found
    for name, tensor in found.items():
        assert (tensor - expected[name]).abs().max() <= 1e-9, name


def assert_best_of_step_6(found: list[dict[str, Any]], expected: State, end: int) -> None:
    """Check that every rank has the weights of step 6."""
    model = tiny_model().eval()
    model.load_state_dict(expected)
    with torch.no_grad():
        output = model(tiny_data(num_samples=10).tensors[0]).float()
    for rank, one in enumerate(found):
        assert (one["best"], one["end"]) == ((0.9, 6), end)
        # Also where other ranks computed it: all of them have gone back.
        torch.testing.assert_close(one["predicted"], output, rtol=1e-6, atol=1e-7)
        if rank == 0:
            assert_equal(one["weights"], expected)


@pytest.fixture(scope="module")
def expected(two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> State:
    """Return the weights after step 6, whose evaluation is the best."""
    return two_ranks.run(after, 6, tmp_path_factory.mktemp("part"))[0]


@pytest.mark.parametrize("length", [slow(1), 2])
def test_a_run_ends_with_the_best_weights_on_every_rank(
    two_ranks: Pool, expected: State, tmp_path: Path, length: int
) -> None:
    settings = {"pipeline_length": length}
    found = two_ranks.run(fit_with_marks, tmp_path / "run", 0, settings)
    assert_best_of_step_6(found, expected, 12)
    kept = [path.name for path in (tmp_path / "run" / "best").iterdir()]
    assert kept == ["step-00000006.safetensors"]
    written = safetensors.torch.load_file(tmp_path / "run" / "best" / kept[0])
    assert_equal(written, expected)


@pytest.mark.parametrize("num_steps", [6, slow(9)])
def test_a_resumed_run_ends_with_the_same_best_weights(
    two_ranks: Pool, expected: State, tmp_path: Path, num_steps: int
) -> None:
    settings = {"checkpoint_every_epochs": 1, "resume": "auto"}
    two_ranks.run(stop_after, tmp_path / "run", num_steps, settings)
    found = two_ranks.run(fit_with_marks, tmp_path / "run", num_steps // 3, settings)
    assert_best_of_step_6(found, expected, 12)


def test_early_stopping_ends_all_ranks_at_one_step_and_so_does_a_resume(
    two_ranks: Pool, expected: State, tmp_path: Path
) -> None:
    settings = {
        "checkpoint_every_epochs": 1,
        "resume": "auto",
        "early_stopping_patience": 1,
        "pipeline_length": 2,
    }
    found = two_ranks.run(fit_with_marks, tmp_path / "run", 0, settings)
    assert_best_of_step_6(found, expected, 9)
    again = two_ranks.run(fit_with_marks, tmp_path / "run", 4, settings)
    assert_best_of_step_6(again, expected, 9)
    longer = {**settings, "early_stopping_patience": 2}
    found = two_ranks.run(fit_with_marks, tmp_path / "run", 3, longer)
    assert_best_of_step_6(found, expected, 12)


def test_best_weights_that_are_gone_are_looked_for_among_those_to_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"checkpoint_every_epochs": 1, "resume": "auto"}
    stop_after(tmp_path, 6, settings)
    with trainer_of(tmp_path, **settings) as trainer:
        trainer.begin()
        assert trainer.report.best_step == 6
    (tmp_path / "best" / "step-00000006.safetensors").unlink()
    with trainer_of(tmp_path, **settings) as trainer:
        trainer.begin()
        # It named the best of evaluations whose weights nobody has.
        assert (trainer.report.best_step, trainer.report.best_metric) == (None, None)
    with caplog.at_level(logging.WARNING):
        found = fit_with_marks(tmp_path, 2, settings)
    assert "the weights of step 6, the best, cannot be read: [Errno 2]" in caplog.text
    assert "The best is looked for among the evaluations to come" in caplog.text
    assert found["best"] == (0.3, 9)


def test_the_best_of_another_metric_is_not_the_best_of_a_resumed_run(tmp_path: Path) -> None:
    settings = {"checkpoint_every_epochs": 1, "resume": "auto"}
    stop_after(tmp_path, 6, settings)
    with trainer_of(tmp_path, **settings, metric_for_best_model="loss") as trainer:
        trainer.begin()
        assert (trainer.report.best_step, trainer.report.best_metric) == (None, None)


def evaluated_steps(settings: dict[str, Any]) -> list[int]:
    """Return after which steps a run evaluates."""
    steps = []

    def note(prediction: EvalPrediction) -> dict[str, float]:
        steps.append(trainer.global_step)
        return {"mark": 0.0}

    defaults = {"load_best_model_at_end": False}
    options = {**defaults, "compute_metrics": note, "epochs": 2, **settings}
    with trainer_of(None, **options) as trainer:
        trainer.fit()
    return steps


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"evaluate_every_steps": 4, "evaluate_every_epochs": 0}, [4, 6]),
        ({"evaluate_every_steps": 3}, [3, 6]),
    ],
)
def test_evaluations_come_every_so_many_steps_and_never_twice(
    settings: dict[str, Any], steps: list[int]
) -> None:
    assert evaluated_steps(settings) == steps


DAMAGED = (
    r"the weights of step \d, the best, cannot be read: .*step-0000000\d.safetensors"
    ".*; put back a copy of that file and resume, or train with load_best_model_at_end=False"
)


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


def test_a_flipped_bit_in_best_weights_gives_the_same_weights_or_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    written = {
        "weight": torch.arange(3.0, dtype=torch.bfloat16),
        "bias": torch.ones(2, 2, dtype=torch.float64),
        "step": torch.tensor(7),
        "none": torch.zeros(0, 3),
    }
    best = BestModel(TrainConfig(folder=tmp_path))
    best.note({"loss": 1.0}, 3)
    best.write(written)
    path = tmp_path / "best" / "step-00000003.safetensors"
    whole = path.read_bytes()
    for offset in range(len(whole)):
        flip(path, offset)
        try:
            found = best.read()
        except CorruptCheckpointError as error:
            assert re.search(DAMAGED, str(error)), error
        else:
            # In the padding, or in what the header says for transformers.
            assert found.keys() == written.keys()
            assert all(torch.equal(found[name], one) for name, one in written.items())
            assert all(found[name].dtype == one.dtype for name, one in written.items())
        path.write_bytes(whole)
    path.write_bytes(whole[:9])
    with pytest.raises(CorruptCheckpointError, match=DAMAGED):
        best.read()


def test_a_run_does_not_end_with_best_weights_that_the_disk_has_changed(tmp_path: Path) -> None:
    data = tiny_data(num_samples=10)
    with pytest.raises(CorruptCheckpointError, match=rf"{DAMAGED}.*last step"):
        with trainer_of(tmp_path, eval_dataset=data) as trainer:
            for _ in range(9):
                trainer.step()
            flip(tmp_path / "best" / "step-00000006.safetensors", -1)
            trainer.fit()


def test_a_run_that_was_over_does_not_end_with_other_weights_than_the_best(tmp_path: Path) -> None:
    settings = {"checkpoint_every_epochs": 1, "resume": "auto"}
    expected = fit_with_marks(tmp_path, 0, settings)
    best = tmp_path / "best" / f"step-{expected['best'][1]:08d}.safetensors"
    flip(best, -1)
    with pytest.raises(CorruptCheckpointError, match=DAMAGED):
        fit_with_marks(tmp_path, 4, settings)
    flip(best, -1)
    assert_equal(fit_with_marks(tmp_path, 4, settings)["weights"], expected["weights"])


def test_a_metric_that_is_nan_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = iter([math.nan, math.nan, 0.5, 0.25])

    def judge(_: EvalPrediction) -> dict[str, float]:
        return {"mark": next(marks)}

    with trainer_of(tmp_path, compute_metrics=judge) as trainer:
        trainer.fit()
        assert (trainer.report.best_metric, trainer.report.best_step) == (0.5, 9)
    assert caplog.text.count("mark is NaN in the evaluation after step 3, and such") == 1
    assert caplog.text.count("is NaN") == 1


def test_what_others_keep_beside_the_best_weights_stays(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    for name in ("step-notes.txt", "step-7", "model.safetensors"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "step-00000001.safetensors").mkdir()
    (folder / "step-00000001.safetensors.tmp").write_text("of a killed write")
    best = BestModel(TrainConfig(folder=tmp_path))
    for step in (2, 3):
        best.note({"loss": 1.0 / step}, step)
        best.write({"weight": torch.ones(1)})
    others = ["model.safetensors", "step-00000001.safetensors", "step-7", "step-notes.txt"]
    left = sorted(path.name for path in folder.iterdir())
    assert left == sorted([*others, "step-00000003.safetensors"])


def test_the_last_checkpoint_s_best_weights_stay_until_the_next(tmp_path: Path) -> None:
    best = BestModel(TrainConfig(folder=tmp_path))

    def note(loss: float, step: int) -> list[str]:
        assert best.note({"loss": loss}, step)
        best.write({"weight": torch.full((1,), loss)})
        return sorted(path.name[-13:-12] for path in (tmp_path / "best").iterdir())

    assert note(5.0, 1) == ["1"]
    assert note(4.0, 2) == ["2"]
    saved = best.state_dict()
    assert note(3.0, 3) == ["2", "3"]
    assert note(2.0, 4) == ["2", "4"]
    best.load_state_dict(saved)
    assert best.read()["weight"] == 4.0
    assert note(1.0, 4) == ["2", "4"]
    best.state_dict()
    assert note(0.5, 5) == ["4", "5"]


def test_best_weights_that_find_no_room_are_not_the_best(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write = best_model.replace_tensors

    def fails_once(path: Path, state: State) -> None:
        if path.stem == "step-00000006":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, state)

    with mock.patch.object(best_model, "replace_tensors", fails_once):
        found = fit_with_marks(tmp_path / "run", 0, {})
    assert found["best"] == (0.3, 9) and found["end"] == 12
    assert_equal(found["weights"], after(9, tmp_path / "again"))
    assert "the weights of step 6, the best so far, cannot be kept: [Errno 28]" in caplog.text

"""Prove that what is logged is printed, and written elsewhere, as transformers does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PrinterCallback, ProgressCallback

from pipetransformer.hf import Trainer
from tests.helpers.hf_runs import made
from tests.helpers.pool import Pool

# Nobody's equal another's; here those of evaluations are not logged at all.
TIMES = ("_runtime", "_per_second")


def printed(out: str) -> list[dict[str, str]]:
    return [ast.literal_eval(line) for line in out.splitlines() if line.startswith("{")]


def lines_of(kind: Any, folder: Path, *, hides_bar: bool, capsys: Any) -> list[dict[str, str]]:
    """Train and evaluate as a script does, and return what it prints but the times."""
    options = {"disable_tqdm": hides_bar, "logging_steps": 3}
    with made(folder / kind.__module__, kind=kind, options=options) as trainer:
        capsys.readouterr()
        trainer.train()
        trainer.evaluate()
    lines = printed(capsys.readouterr().out)
    return [{n: v for n, v in line.items() if not n.endswith(TIMES)} for line in lines]


@pytest.mark.parametrize("hides_bar", [False, True])
def test_the_lines_are_those_of_transformers_with_and_without_a_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hides_bar: bool
) -> None:
    theirs = lines_of(transformers.Trainer, tmp_path, hides_bar=hides_bar, capsys=capsys)
    ours = lines_of(Trainer, tmp_path, hides_bar=hides_bar, capsys=capsys)
    assert len(ours) == len(theirs) == 5 + hides_bar
    for mine, other in zip(ours, theirs, strict=True):
        assert list(mine) == list(other)
        # Four digits each, of numbers that are equal within 1e-4.
        assert {n: float(v) for n, v in mine.items()} == pytest.approx(
            {n: float(v) for n, v in other.items()}, rel=2e-3
        )


@pytest.mark.parametrize("hides_bar", [False, True])
def test_the_callback_that_prints_is_removed_by_the_name_it_has_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hides_bar: bool
) -> None:
    there, other = PrinterCallback, ProgressCallback
    if not hides_bar:
        there, other = other, there
    with made(tmp_path, options={"disable_tqdm": hides_bar, "max_steps": 2}) as trainer:
        trainer.remove_callback(other)
        trainer.train()
        assert printed(capsys.readouterr().out)
    with made(tmp_path / "none", options={"disable_tqdm": hides_bar, "max_steps": 2}) as trainer:
        trainer.remove_callback(there)
        trainer.train()
        assert printed(capsys.readouterr().out) == []


def train_into(folder: Path) -> int:
    """Count the lines that this rank prints."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch, made(folder, options={"max_steps": 2}) as trainer:
        patch.setattr("pipetransformer.hf.callback_bridge.tqdm.write", lines.append)
        trainer.train()
    return len(lines)


def test_the_main_process_alone_prints(two_ranks: Pool, tmp_path: Path) -> None:
    first, second = two_ranks.run(train_into, tmp_path)
    assert (first, second) == (4, 0)


def test_tensorboard_is_written_what_is_logged(tmp_path: Path) -> None:
    accumulation = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with made(tmp_path, options={"report_to": "tensorboard"}) as trainer:
        trainer.train()
        history = trainer.state.log_history
    (file,) = (tmp_path / "runs").rglob("events.out.tfevents.*")
    events = accumulation.EventAccumulator(str(file.parent)).Reload()
    for tag, name in (
        ("train/loss", "loss"),
        ("train/learning_rate", "learning_rate"),
        ("eval/accuracy", "eval_accuracy"),
        ("train/train_loss", "train_loss"),
    ):
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        logged = [(entry["step"], entry[name]) for entry in history if name in entry]
        assert [step for step, _ in written] == [step for step, _ in logged] != []
        assert [value for _, value in written] == pytest.approx([value for _, value in logged])

"""Callbacks of transformers that write elsewhere write what is logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipetransformer.hf.test_hf_trainer import made


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

"""The best model of a run lies in a folder that from_pretrained loads, and the state names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from pipetransformer.hf import Trainer
from tests.pipetransformer.hf.test_hf_trainer import made
from tests.pool import Pool

# Steps that grow, so that the last evaluation is not the best.
BEST: dict[str, Any] = {
    "learning_rate": 10.0,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 12,
    "num_train_epochs": 3,
    "optim": "sgd",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
}


def train_and_look(folder: Path, batch_size: int) -> tuple[str | None, int | None, int]:
    """Train, and return where the best model is said to be, its step and the last step."""
    options = {**BEST, "per_device_train_batch_size": batch_size}
    with made(folder, options=options) as trainer:
        assert trainer.state.best_model_checkpoint is None
        trainer.train()
        state = trainer.state
        if trainer.is_world_process_zero():
            loaded = transformers.BertForSequenceClassification.from_pretrained(
                state.best_model_checkpoint
            )
            own = trainer.model.state_dict()
            for name, tensor in loaded.state_dict().items():
                assert torch.equal(tensor, own[name]), name
        return state.best_model_checkpoint, state.best_global_step, state.global_step


def assert_is_the_best(folder: Path, best_step: int) -> None:
    """Compare the folder's weights with those that were kept at the best evaluation."""
    written = safetensors.torch.load_file(folder / "model.safetensors")
    kept = safetensors.torch.load_file(folder / f"step-{best_step:08d}.safetensors")
    assert written.keys() == kept.keys()
    for name, tensor in kept.items():
        assert torch.equal(written[name], tensor), name


def test_the_best_model_checkpoint_holds_the_weights_of_the_best_evaluation(
    tmp_path: Path,
) -> None:
    named, best_step, last_step = train_and_look(tmp_path, 8)
    assert named == str(tmp_path / "best")
    assert best_step is not None and best_step < last_step
    assert_is_the_best(tmp_path / "best", best_step)


def test_every_process_is_told_of_the_folder_that_one_writes(
    two_ranks: Pool, tmp_path: Path
) -> None:
    first, second = two_ranks.run(train_and_look, tmp_path, 4)
    named, best_step, last_step = first
    assert first == second and named == str(tmp_path / "best")
    assert best_step is not None and best_step < last_step
    assert_is_the_best(tmp_path / "best", best_step)


@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer])
def test_a_run_that_keeps_no_best_model_names_none(tmp_path: Path, kind: Any) -> None:
    options = {**BEST, "load_best_model_at_end": False, "save_strategy": "no"}
    with made(tmp_path, kind=kind, options=options) as trainer:
        trainer.train()
        assert trainer.state.best_model_checkpoint is None
    assert not (tmp_path / "best").exists()

"""Prove what a run that continues says of itself, and when it is known where it is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from pipetransformer.checkpoint import run_state
from tests.models import NUM_SAMPLES
from tests.pipetransformer.checkpoint.test_resume import make_trainer, train


def test_a_resume_says_where_it_continues_and_what_is_set_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, max_steps=6)
    with caplog.at_level(logging.INFO, "pipetransformer"):
        with make_trainer(tmp_path, resume=True, max_steps=6) as trainer:
            trainer.fit()
        train(tmp_path, resume=True, global_batch_size=8, learning_rate_schedule="cosine")
    same, changed = [text for text in caplog.messages if text.startswith("continues")]
    assert same == "continues from step 6 (step-00000006)"
    assert changed == (
        f"{same}; changed since: max_steps 6 -> None, global_batch_size 6 -> 8, "
        "learning_rate_schedule constant -> cosine"
    )


def test_a_checkpoint_that_holds_no_settings_is_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_state.RunState, "_settings", lambda self: {})
        train(tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO, "pipetransformer"):
        train(tmp_path, resume=True, max_steps=4)
    assert "continues from step 2 (step-00000002)" in caplog.messages


def test_begin_tells_that_the_run_that_is_continued_had_ended(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    with make_trainer(tmp_path, resume=True, max_steps=2) as trainer:
        trainer.begin()
        assert trainer.is_over and trainer.global_step == 2
        while not trainer.is_over:
            trainer.step()
        with pytest.raises(RuntimeError, match="epochs are done, or the run was stopped"):
            trainer.step()
    with make_trainer(tmp_path, resume=True, max_steps=2) as trainer:
        assert not trainer.is_over
        with pytest.raises(RuntimeError, match=r"had ended already, at step 2; .*begin\(\)"):
            trainer.step()
        assert trainer.is_over
    with make_trainer(tmp_path, resume=True, max_steps=3) as trainer:
        trainer.begin()
        trainer.begin()
        assert not trainer.is_over and trainer.global_step == 2
        trainer.fit()
        assert trainer.global_step == 3


def test_an_epoch_goes_on_in_the_order_in_which_it_began(tmp_path: Path) -> None:
    # 11 of 96 samples came twice, and as many never, where an order was given at the resume.
    def backwards(epoch: int) -> torch.Tensor:
        return torch.arange(NUM_SAMPLES).flip(0)

    train(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="12 samples of the epoch were trained on in another"):
        train(tmp_path, resume=True, sample_order=backwards)
    train(tmp_path, resume=True, epochs=1)
    train(tmp_path, resume=True, epochs=2, sample_order=backwards)

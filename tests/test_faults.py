"""Prove that what goes wrong is loud: an error on every rank or a recovered run, never a hang or a
wrong number."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipetransformer import Trainer, WorkerFailedError, launch
from pipetransformer.stage import NonFiniteError
from tests.models import tiny_data, tiny_model
from tests.pool import Pool
from tests.scenario import build_adamw, slow_start


def train(folder: str, killed_at: int, resume: bool) -> None:
    """Train in a launched process; rank 1 kills itself at a step."""

    def schedule(step: float, max_steps: int) -> float:
        if os.environ["RANK"] == "1" and round(step) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return slow_start(step, max_steps)

    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=build_adamw,
        epochs=4,
        batch_size=6,
        length=2,
        micro_batches=2,
        schedule="1f1b",
        folder=folder,
        checkpoint_every_epochs=1,
        resume=resume,
        progress=False,
        learning_rate_schedule=schedule,
    ) as trainer:
        trainer.fit()
        trainer.save_model(Path(folder) / "model.safetensors")


def test_a_killed_rank_is_named_at_once_and_the_run_continues_where_it_was(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch(train, (str(whole), -1, False), num_slots=2)
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        launch(train, (str(cut), 12, False), num_slots=2)
    assert time.monotonic() - start < 60  # Most of it is the start of two processes.
    launch(train, (str(cut), -1, True), num_slots=2)
    ours, theirs = (safetensors.torch.load_file(p / "model.safetensors") for p in (cut, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def poisoned() -> TensorDataset:
    """Make one sample not a number."""
    x, y = tiny_data().tensors
    x = x.clone()
    x[3, 0] = float("nan")
    return TensorDataset(x, y)


def losses_with_a_nan(on_nonfinite: str, length: int) -> list[tuple[float, bool]]:
    """Train an epoch in which one batch is poisoned."""
    with Trainer(
        tiny_model(),
        poisoned(),
        loss_fn=nn.CrossEntropyLoss(),
        batch_size=6,
        length=length,
        on_nonfinite=on_nonfinite,
        progress=False,
        evaluate_every_epochs=0,
    ) as trainer:
        results = [trainer.step() for _ in range(5)]
        assert all(
            torch.isfinite(p).all() for p in trainer._deployment.active_stage.parameters.values()
        )
        return [(result.loss, result.skipped) for result in results]


def refuse_a_nan(length: int) -> None:
    with pytest.raises(NonFiniteError, match=r"step \d: the loss is nan"):
        losses_with_a_nan("raise", length)


@pytest.mark.parametrize("length", [1, 2])
def test_a_nan_on_one_rank_ends_the_run_on_all(two_ranks: Pool, length: int) -> None:
    two_ranks.run(refuse_a_nan, length)


@pytest.mark.parametrize("length", [1, 2])
def test_a_nan_on_one_rank_skips_the_step_on_all(two_ranks: Pool, length: int) -> None:
    first, second = two_ranks.run(losses_with_a_nan, "skip", length)
    assert [skipped for _, skipped in first] == [skipped for _, skipped in second]
    assert sum(skipped for _, skipped in first) == 1
    assert [repr(loss) for loss, _ in first] == [repr(loss) for loss, _ in second]

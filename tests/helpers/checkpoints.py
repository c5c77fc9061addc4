"""Write checkpoints and hold them against what was saved."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from freeze import FreezeSchedule
from pipetransformer import EvalPrediction, Trainer
from pipetransformer.checkpoint.format import (
    Checkpoint,
    ShardRecord,
    checkpoint_folder,
    publish,
    write_shards,
)
from pipetransformer.checkpoint.resume import open_latest
from pipetransformer.checkpoint.saver import Snapshot
from tests.helpers.models import tiny_data, tiny_model

Shards = dict[str, dict[str, Tensor]]


def state_at(step: int) -> list[Shards]:
    """Make the shards of two ranks, different at every step."""
    return [
        {
            f"blocks.{rank}/weights": {"w": torch.full((3, 2), step + rank + 0.5)},
            f"blocks.{rank}/optimizer": {"w.exp_avg": torch.arange(4.0) * (step + rank)},
        }
        for rank in range(2)
    ]


def write(folder: Path, shards: Shards) -> dict[str, ShardRecord]:
    """Copy and write shards, as one rank does."""
    return write_shards(folder, Snapshot().take(shards))


def latest(directory: Path) -> Checkpoint | None:
    """Find the newest usable checkpoint, in a world of one process."""
    return open_latest(directory, group=None)


def save(directory: Path, step: int, *, keep: int = 2) -> Path:
    """Save as a run does: rank 0 makes the folder, every rank writes, rank 0 publishes."""
    folder = checkpoint_folder(directory, step)
    records: dict[str, ShardRecord] = {}
    for shards in state_at(step):
        records |= write(folder, shards)
    publish(folder, records, {"step_scalar": step / 3}, keep=keep)
    return folder


class Killed(BaseException):
    """Stand for SIGKILL: no handler of ordinary errors sees it."""


def survives(action: Callable[[], object], fatal_call: int) -> bool:
    """Act, killed at the n-th change of the disk; return whether there were fewer changes.

    A kill at an fsync also loses half of the file, as a power cut may.
    """
    calls = itertools.count()

    def dying(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) != fatal_call:
                return real(*args, **kwargs)
            if name == "fsync" and stat.S_ISREG(os.fstat(args[0]).st_mode):
                os.truncate(f"/proc/self/fd/{args[0]}", os.fstat(args[0]).st_size // 2)
            raise Killed

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "fsync", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, dying(name))
        try:
            action()
        except Killed:
            return False
    return True


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare names, dtypes, shapes and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        cpu = tensor.detach().cpu()
        assert found[name].dtype == cpu.dtype and found[name].shape == cpu.shape, name
        assert torch.equal(found[name], cpu), name


def assert_holds_step(checkpoint: Checkpoint | None, step: int) -> None:
    """Compare everything a checkpoint holds with what `save` wrote at this step."""
    assert checkpoint is not None and checkpoint.step == step
    assert checkpoint.scalars == {"step_scalar": step / 3}
    expected = {name: tensors for shards in state_at(step) for name, tensors in shards.items()}
    assert set(checkpoint.records) == set(expected)
    for name, tensors in expected.items():
        assert_same(checkpoint.read(name), tensors)


class Marks:
    """Give the evaluations of a run, one after the other, marks that were decided before."""

    def __init__(self, *marks: float, first: int = 0) -> None:
        self._marks = list(marks)[first:]

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        return {"mark": self._marks.pop(0)}


def trainer_of(folder: Path | None, **settings: Any) -> Trainer:
    """Build a trainer of at most four epochs of three steps that keeps the best of its marks."""
    return Trainer(
        tiny_model(),
        tiny_data(num_samples=24),
        loss_fn=nn.CrossEntropyLoss(),
        # The best may be of a time when less was frozen.
        freeze=FreezeSchedule((0, 1, 2, 2)),
        **{
            "eval_dataset": tiny_data(num_samples=10),
            "folder": folder,
            "epochs": 4,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "progress": False,
            "metric_for_best_model": "mark",
            "load_best_model_at_end": True,
            "compute_metrics": Marks(0.2, 0.9, 0.3, 0.1),
            **settings,
        },
    )


State = dict[str, Tensor]


def copied(trainer: Trainer) -> State:
    return {name: tensor.detach().clone() for name, tensor in trainer.state_dict().items()}


def fitted(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train to the end; return the weights, and what there is to see of the best."""
    data = tiny_data(num_samples=10)
    with trainer_of(folder, **{"eval_dataset": data, **settings}) as trainer:
        report = trainer.fit()
        weights, again = copied(trainer), copied(trainer)
        assert weights.keys() == again.keys()
        predicted = torch.from_numpy(trainer.predict(tiny_data(num_samples=10)).predictions)
        return {
            "weights": weights,
            "best": (report.best_metric, report.best_step),
            "end": trainer.global_step,
            "predicted": predicted,
        }


MARKS = (0.2, 0.9, 0.3, 0.1, 0.0)


def fit_with_marks(folder: Path, first: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with the marks from an evaluation on; the last is for the prediction."""
    return fitted(folder, compute_metrics=Marks(*MARKS, first=first), **settings)


def stop_after(folder: Path, num_steps: int, settings: dict[str, Any]) -> int:
    """Take so many steps, and let the checkpoint of the last be written."""
    with trainer_of(folder, **settings) as trainer:
        for _ in range(num_steps):
            trainer.step()
    return trainer.global_step

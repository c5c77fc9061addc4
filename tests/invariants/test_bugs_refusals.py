"""Keep what ended in a raw error, or went unnoticed, refused or working; each with its story."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS
from torch.utils.data import TensorDataset

from pipetransformer import Trainer
from pipetransformer.checkpoint.format import FORMAT_VERSION, open_checkpoint, published
from tests.invariants.test_bugs_numbers import TINY, sgd
from tests.loops import make_trainer
from tests.models import tiny_data, tiny_model
from tests.pool import Pool
from tests.scenario import Forced, Shape


def test_an_optimizer_that_needs_a_closure_is_refused_at_the_start() -> None:
    # It ended within the first step, as "step() missing 1 required positional argument".
    with pytest.raises(ValueError, match=r"LBFGS cannot take a step .* needs no closure"):
        make_trainer(replace(TINY, optimizer=lambda named: LBFGS([p for _, p in named])))


def test_sparse_gradients_are_refused_at_the_start() -> None:
    # They ended within the first step, as "Sparse CPU tensors do not have strides".
    model = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 3))
    data = TensorDataset(torch.arange(5), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"'0' is an Embedding with sparse=True.*sparse=False"):
        Trainer(model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd, progress=False)


def test_lazy_parameters_are_refused_at_the_start() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"'0.weight' is a UninitializedParameter.*one forward"):
        Trainer(model, tiny_data(), loss_fn=nn.CrossEntropyLoss(), progress=False)


@pytest.mark.parametrize("elsewhere", ["../secret", "/etc/passwd", "sub/file", "..", ""])
def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path: Path, elsewhere: str) -> None:
    # Whoever could write a manifest chose which files of the machine were read.
    saves = {**TINY.settings, "folder": tmp_path, "checkpoint_every_epochs": 1}
    with make_trainer(replace(TINY, settings=saves)) as trainer:
        trainer.fit()
    folder = next((tmp_path / "checkpoints").glob("step-*"))
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    next(iter(content["shards"].values()))["file"] = elsewhere
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": seal, "content": content}))
    with pytest.raises(ValueError, match="which is no file of its folder"):
        open_checkpoint(folder)


def test_the_pointer_cannot_name_a_folder_elsewhere(tmp_path: Path) -> None:
    content = {"format": FORMAT_VERSION, "checkpoints": ["../elsewhere"]}
    seal = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (tmp_path / "latest").write_text(json.dumps({"sha256": seal, "content": content}))
    with pytest.raises(ValueError, match="'../elsewhere', which is no checkpoint of its folder"):
        published(tmp_path)


class Slow(TensorDataset):
    """Take a while to read a sample."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


def evaluate_for_long() -> dict[str, float]:
    """Evaluate for longer than a rank waits for another, beside a spare rank."""
    x, y = tiny_data().tensors
    with Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
        global_batch_size=4,
        plan=Forced({0: Shape(3, 1, spares=True)}),
        evaluate_every_epochs=0,
        progress=False,
    ) as trainer:
        trainer.step()
        stage = trainer._deployment.active_stage
        with mock.patch.object(stage, "_timeout_s", 1.5), short_world_waits(1.5):
            return trainer.evaluate(Slow(x.repeat(2, 1), y.repeat(2)))


@contextmanager
def short_world_waits(seconds: float) -> Iterator[None]:
    """Let collectives of the world fail after so many seconds."""
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        group.set_timeout(timedelta(seconds=60))


@pytest.mark.slow
def test_a_spare_waits_for_an_evaluation_however_long_it_takes(four_ranks: Pool) -> None:
    # It waited for the sums of the whole evaluation, and lost patience after setup_timeout_s.
    start = time.perf_counter()
    results = four_ranks.run(evaluate_for_long)
    assert time.perf_counter() - start > 2.5 and len({one["loss"] for one in results}) == 1


def test_fit_goes_on_where_steps_have_stopped() -> None:
    # There was no public way to ask how far a run had come.
    with make_trainer(TINY) as trainer, make_trainer(TINY) as other:
        assert (trainer.global_step, trainer.max_steps, trainer.is_over) == (0, 8, False)
        for done in range(1, 4):
            trainer.step()
            assert trainer.global_step == done
        trainer.fit()
        other.fit()
        assert (trainer.global_step, trainer.max_steps, trainer.is_over) == (8, 8, True)
        for name, tensor in trainer.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
        with pytest.raises(RuntimeError, match="all 2 epochs are done"):
            trainer.step()

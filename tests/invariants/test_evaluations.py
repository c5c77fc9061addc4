"""Prove what an evaluation finds, and that it leaves training alone."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipetransformer import Trainer
from tests.helpers.inspection import feed_of, model_of, stage_of
from tests.helpers.loops import TINY, make_trainer, sgd
from tests.helpers.marks import slow
from tests.helpers.measured import freely, measuring
from tests.helpers.models import NUM_SAMPLES, tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.scenario import Forced, Shape


def evaluate_one_example() -> dict[str, float]:
    """Evaluate fewer examples than there are replicas, before any training."""
    x, y = tiny_data().tensors
    with tiny_trainer(global_batch_size=8, pipeline_length=1) as trainer:
        return trainer.evaluate(TensorDataset(x[:1], y[:1]))


@pytest.mark.slow
def test_a_replica_without_examples_takes_part_in_evaluation(four_ranks: Pool) -> None:
    # split() of an empty tensor yields one empty piece, which was cut into zero micro-batches; and
    # a trainer that had not trained yet had no stage to evaluate with.
    x, y = tiny_data().tensors
    output = tiny_model()(x[:1])
    expected = nn.functional.cross_entropy(output, y[:1]).item()
    for metrics in four_ranks.run(evaluate_one_example):
        assert abs(metrics["loss"] - expected) < 1e-9
        assert metrics["accuracy"] == float(output.argmax() == y[0])


def test_an_evaluation_s_loss_is_probed() -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(output, target.clamp(min=0), reduction="none")
        return (losses * (target >= 0)).sum() / (target >= 0).sum().clamp(min=1)

    data = tiny_data(num_samples=8)
    x, y = data.tensors
    ignored = torch.utils.data.TensorDataset(x, y.where(torch.arange(8) < 3, -100))
    settings = {"global_batch_size": 8, "micro_batches": 4}
    job = replace(TINY, loss_fn=masked, data=lambda: data, settings=settings)
    with make_trainer(job) as trainer:
        trainer.step()
        with pytest.raises(ValueError, match="'.*masked' depends on how a batch is split"):
            trainer.evaluate(ignored)


class Slow(TensorDataset):
    """Take a while to read a sample."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


def evaluate_for_long() -> dict[str, float]:
    """Evaluate for longer than a rank waits for another, beside a spare rank."""
    x, y = tiny_data().tensors
    with tiny_trainer(
        optimizer=sgd,
        global_batch_size=4,
        plan=Forced({0: Shape(3, 1, spares=True)}),
        evaluate_every_epochs=0,
    ) as trainer:
        trainer.step()
        stage = stage_of(trainer)
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


def in_place(output: Tensor, target: Tensor) -> tuple[float, float]:
    return float((output.sigmoid_() > 0.5).sum()), output.numel()


def test_a_metric_that_writes_into_the_output_is_refused() -> None:
    # The evaluation's loss was that of what it left (1.09 instead of 1.15).
    job = replace(TINY, settings={**TINY.settings, "metrics": {"bad": in_place}})
    with make_trainer(job) as trainer:
        trainer.step()
        with pytest.raises(ValueError, match="metric 'bad' writes into the output"):
            trainer.evaluate(tiny_data())


class Damaged(TensorDataset):
    """Samples of which a late one cannot be read, as long as it is damaged."""

    is_damaged = True

    def __getitem__(self, index: Any) -> Any:
        if self.is_damaged and index == NUM_SAMPLES - 2:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def about(trainer: Trainer) -> tuple[Any, ...]:
    """Return what an evaluation must leave as it was."""
    modules = list(model_of(trainer).modules())
    hooks = [{n: len(h) for n, h in vars(m).items() if n.endswith("_hooks")} for m in modules]
    alive = {process.pid for process in multiprocessing.active_children()}
    return alive, {*threading.enumerate()}, hooks, [module.training for module in modules]


@pytest.mark.parametrize(
    ("is_own", "ask"),
    [
        (True, Trainer.evaluate),
        (False, Trainer.predict),
        slow(True, Trainer.predict),
        slow(False, Trainer.evaluate),
    ],
)
def test_an_evaluation_that_fails_leaves_nothing_behind_and_the_run_goes_on(
    is_own: bool, ask: Any
) -> None:
    # Workers had stayed until the trainer's `close`, or for as long as the error was held.
    damaged = Damaged(*tiny_data().tensors)
    settings: dict[str, Any] = {"freeze": 2, "num_workers": 1, "global_batch_size": 8}
    own = {"eval_dataset": damaged, "evaluate_every_epochs": 0} if is_own else {}
    with tiny_trainer(**settings, **own) as trainer:
        trainer.step()
        before = about(trainer)
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot give sample 24: OSError: image file"):
                ask(trainer, damaged)
            for thread in {*threading.enumerate()} - before[1]:
                thread.join(60.0)  # A queue's ends behind its close.
            assert about(trainer) == before
        damaged.is_damaged = False
        found = trainer.evaluate(damaged)
        trainer.fit()
        weights = trainer.state_dict()
    with tiny_trainer(**settings) as plain:
        plain.step()
        assert found == plain.evaluate(tiny_data())
        plain.fit()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(weights[name], tensor), name


def test_weights_that_are_put_back_behind_a_failed_evaluation_are_noticed() -> None:
    # Weights averaged for an evaluation are put in and out through `.data`, without a trace.
    damaged = Damaged(*tiny_data().tensors)
    settings = {"freeze": 2, "eval_dataset": damaged, "global_batch_size": 8, "epochs": 3}
    with measuring(freely), tiny_trainer(**settings) as trainer:
        trainer.step()
        stamps = [*feed_of(trainer).prefix.stamps]
        frozen = next(model_of(trainer).parameters())
        frozen.data.add_(1.0)
        with pytest.raises(ValueError, match="cannot give sample 24"):
            trainer.evaluate()
        assert feed_of(trainer).prefix.stamps != stamps
        frozen.data.sub_(1.0)
        trainer.step()
        assert stamps and feed_of(trainer).prefix.stamps == stamps

"""Prove which random numbers layers, optimizers and the script itself draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pipetransformer import Trainer
from tests.helpers.loops import TINY, Job, make_trainer, train
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool
from tests.helpers.unusual import Layer, around


class Rounding(SGD):
    """Round weights up or down by chance."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(2e-15 * torch.rand_like(parameter))


def rounding(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Build it."""
    return Rounding([p for _, p in named], lr=0.1)


def test_an_optimizer_that_draws_numbers_draws_the_same_on_all_replicas(two_ranks: Pool) -> None:
    # It drew what the last layer's seed left, which differs by replica.
    job = Job(tiny_model, tiny_data, rounding, settings={"pipeline_length": 1, "micro_batches": 2})
    first, second = two_ranks.run(train, job)
    for name, tensor in first.trained.items():
        assert torch.equal(tensor, second.trained[name]), name


@pytest.mark.parametrize("begin", [Trainer.step, Trainer.fit])
def test_the_caller_s_random_numbers_go_on(begin: Callable[[Trainer], object]) -> None:
    # Every read of a sample seeded them: after an evaluation they were always the same; and so
    # they were after a fit that began the run.
    # A list is read sample by sample.
    with make_trainer(replace(TINY, data=lambda: list(tiny_data()))) as trainer:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        expected = [torch.rand(4), torch.tensor(np.random.rand(4)), torch.tensor(random.random())]
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        begin(trainer)
        trainer.evaluate(tiny_data())
        trainer.verify()
        found = [torch.rand(4), torch.tensor(np.random.rand(4)), torch.tensor(random.random())]
    assert all(map(torch.equal, found, expected))


DRAWN: list[float] = []


def noisy(layer: Layer, hidden: Tensor) -> Tensor:
    """Scale by numbers of Python's and of numpy's while training."""
    if not layer.training:
        return hidden
    DRAWN.append(random.random())
    return hidden * (1 + DRAWN[-1] + np.random.rand())


def plainly_random() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return around(Layer(noisy), Layer(noisy))


def losses_of(job: Job) -> list[float]:
    with make_trainer(job) as trainer:
        return [trainer.step().loss for _ in range(6)]


def test_python_s_and_numpy_s_numbers_go_on_from_step_to_step() -> None:
    # They stood still: a layer that was dropped by chance was dropped in every step or in none.
    random.seed(3)
    state = random.getstate()
    job = replace(TINY, build=plainly_random)
    DRAWN.clear()
    first = losses_of(job)
    assert len({*DRAWN}) > 20 and random.getstate() == state
    assert losses_of(job) == first


@pytest.mark.parametrize("length", [1, 2])
def test_numbers_drawn_in_layers_do_not_depend_on_the_pipeline(
    two_ranks: Pool, length: int
) -> None:
    settings = {"micro_batch_size": 4, "pipeline_length": length}
    job = replace(TINY, build=plainly_random, settings=settings)
    alone = losses_of(replace(job, settings={"micro_batch_size": 4, "pipeline_length": 1}))
    for losses in two_ranks.run(losses_of, job):
        assert losses == pytest.approx(alone, rel=1e-12)

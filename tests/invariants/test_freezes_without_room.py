"""Prove that a freeze never ends a run: where frozen weights have no room, fewer layers freeze."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autopipe.plan import least_memory_plan
from freeze import FreezeSchedule
from pipetransformer import Trainer
from tests.helpers.inspection import elastic_of
from tests.helpers.pool import Pool

WIDTH, NUM_LAYERS, NUM_SAMPLES = 64, 8, 32
WANTED = (0, 4, 8, 8, 2)
"""Frozen layers by epoch."""


def trainer_of(frozen: tuple[int, ...], **settings: Any) -> Trainer:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).double()
    inputs = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64)
    return Trainer(
        model, TensorDataset(inputs, torch.arange(NUM_SAMPLES) % 3), epochs=len(frozen),
        loss_fn=nn.CrossEntropyLoss(), global_batch_size=16, progress=False,
        freeze=FreezeSchedule(frozen), **settings,
    )  # fmt: skip


def least_bytes() -> list[int]:
    """Return the bytes that the fullest stage needs at least, by frozen layers."""
    with trainer_of(WANTED) as trainer:
        trainer.begin()
        profile = trainer.measure()
        requests = map(trainer.plan_request, range(NUM_LAYERS + 1))
        return [max(least_memory_plan(profile, one).peak_bytes) for one in requests]


def frozen_under(limit: int) -> tuple[list[int], dict[str, Tensor]]:
    """Train under a limit; return the frozen layers by epoch, and the weights."""
    with trainer_of(WANTED, memory_limit_bytes=limit) as trainer:
        frozen = []
        trainer.begin()
        while not trainer.is_over:
            trainer.step()
            decision = elastic_of(trainer).decision
            assert decision is not None and max(decision.plan.peak_bytes) <= limit
            frozen.append(decision.num_frozen)
        return frozen[::2], trainer.state_dict()


def weights_of(frozen: tuple[int, ...]) -> dict[str, Tensor]:
    with trainer_of(frozen) as trainer:
        trainer.fit()
        return trainer.state_dict()


def due(least: list[int], limit: int) -> list[int]:
    """Return what freezes by epoch: what is wanted, or the most of it that has room."""
    frozen: list[int] = []
    for wanted in WANTED:
        at_least = min(wanted, frozen[-1] if frozen else 0)
        fitting = [n for n in range(at_least, wanted + 1) if least[n] <= limit or n == at_least]
        frozen.append(fitting[-1])
    return frozen


def test_a_freeze_is_cut_back_to_what_has_room(four_ranks: Pool) -> None:
    least = four_ranks.run(least_bytes)[0]
    assert least[0] < least[NUM_LAYERS]
    limit = least[NUM_LAYERS] - 1
    frozen, weights = four_ranks.run(frozen_under, limit)[0]
    assert frozen == due(least, limit) and max(frozen) < NUM_LAYERS
    for name, tensor in four_ranks.run(weights_of, tuple(frozen))[0].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-9)


def all_frozen_under(limits: list[int]) -> list[list[int]]:
    return [frozen_under(limit)[0] for limit in limits]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_no_freeze_ends_a_run_whatever_the_limit(
    num_ranks: int, seed: int, request: pytest.FixtureRequest
) -> None:
    pool: Pool = request.getfixturevalue({4: "four_ranks", 8: "eight_ranks"}[num_ranks])
    least = pool.run(least_bytes)[0]
    chosen = random.Random(seed)
    limits = [chosen.randint(least[0], max(least) + 1000) for _ in range(10)]
    for limit, frozen in zip(limits, pool.run(all_frozen_under, limits)[0], strict=True):
        assert frozen == due(least, limit), limit

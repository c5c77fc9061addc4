"""Prove that of large embeddings only those rows count as summed that a batch may touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipetransformer.measure.measurements import measure
from pipetransformer.processes.world import connect
from tests.models import Entries
from tests.pipetransformer.measure.test_measurements import make_task
from tests.pool import Pool

ROWS, WIDTH, TOKENS, BATCH = 20_000, 32, 6, 16


def texts(num_samples: int = 32) -> Entries:
    """Give every sample tokens of its own, as far as a batch goes."""
    ids = torch.arange(num_samples * TOKENS).view(num_samples, TOKENS)
    return Entries({"x": ids % ROWS, "y": torch.zeros(num_samples, dtype=torch.int64)})


def text_model(rows: int = ROWS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Embedding(rows, WIDTH), nn.Flatten()),
        nn.Linear(TOKENS * WIDTH, 16),
        nn.Linear(16, 3),
    )


def read(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: entry[ids] for name, entry in texts().tensors.items()}


def measured(rows: int, frozen: bool = False) -> list[tuple[int, float]]:
    model = text_model(rows)
    model[0].requires_grad_(not frozen)
    task = make_task(model, global_batch_size=BATCH)
    profile = measure(task, connect("cpu", timeout_s=30.0), read).profile
    return [(cost.gradient_bytes, cost.untouched_bytes) for cost in profile.sublayers]


def test_as_many_rows_are_summed_as_a_batch_has_tokens(two_ranks: Pool) -> None:
    for embedding, *others in two_ranks.run(measured, ROWS):
        assert embedding == (4 * WIDTH * ROWS, 4 * WIDTH * (ROWS - BATCH * TOKENS))
        assert {untouched for _, untouched in others} == {0.0}


@pytest.mark.parametrize(("rows", "frozen"), [(1000, False), (ROWS, True)])
def test_a_small_embedding_is_summed_whole_and_a_frozen_one_not_at_all(
    two_ranks: Pool, rows: int, frozen: bool
) -> None:
    for embedding, *_ in two_ranks.run(measured, rows, frozen):
        assert embedding == (0 if frozen else 4 * WIDTH * rows, 0.0)


def test_alone_nothing_is_summed_and_nothing_counted() -> None:
    assert {untouched for _, untouched in measured(ROWS)} == {0.0}


def test_hooks_are_gone_afterwards(two_ranks: Pool) -> None:
    assert two_ranks.run(hooks_left) == [0, 0]


def hooks_left() -> int:
    model: Any = text_model()
    task = make_task(model, global_batch_size=BATCH)
    measure(task, connect("cpu", timeout_s=30.0), read)
    return sum(len(module._forward_pre_hooks) for module in model.modules())

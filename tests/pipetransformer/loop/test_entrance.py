"""What lies below the blocks is left out, too, where nobody misses it; and rows stay as read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import freeze as freezing
from pipetransformer import attach
from tests.helpers.row_models import DEPTH, NUM_CLASSES, NUM_SAMPLES, WIDTH, WORDS, Block, texts

RUNS: list[int] = []
"""Samples that each forward of the entrance was given. No attribute, as `attach` may look."""
BATCH_SIZE = 4


class Embedding(nn.Module):
    """Embed tokens, and keep what `keeps` says of them."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.words, self.keeps, self.kept = nn.Embedding(WORDS, WIDTH), keeps, 0.0

    def forward(self, ids: Tensor) -> Tensor:
        RUNS.append(len(ids))
        embedded: Tensor = self.words(ids)
        if self.keeps:
            self.kept = float(embedded.detach().sum())
        return embedded


class WritingBlock(Block):
    """Write into its input, as in-place activations do."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(1.5))


class Classifier(nn.Module):
    """Classify texts.

    Args:
        writes: whether the first block that trains writes into its input.
    """

    def __init__(self, *, keeps: bool = False, writes: bool = False) -> None:
        super().__init__()
        self.embed = Embedding(keeps=keeps)
        kinds = [Block] * 4
        kinds[DEPTH] = WritingBlock if writes else Block
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


def usual(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def with_kept(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return usual(model, x, y) * (1 + model.embed.kept)


def twice(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)


def train(
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
    *,
    is_served: bool,
    prepare: Callable[[nn.Module], object] = lambda _: None,
    **options: Any,
) -> tuple[dict[str, Tensor], int, int]:
    """Train three epochs; return the weights, the last epoch's hits, and the entrance's runs."""
    torch.manual_seed(0)
    model = Classifier(**options).double()
    prepare(model)
    loader: DataLoader[Any] = DataLoader(texts(), BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cached = attach(model, freeze=DEPTH) if is_served else None
    freezing.apply(model, DEPTH, layers=list(model.blocks))
    for _ in range(3):
        RUNS.clear()
        for x, y in loader if cached is None else cached.epoch(loader):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if cached is None:
        return dict(model.state_dict()), 0, len(RUNS)
    with cached:
        return dict(model.state_dict()), cached.stats.hits, len(RUNS)


SEEN: list[int] = []


def look_into_it(model: Any) -> None:
    SEEN.clear()
    model.embed.words.register_forward_hook(lambda *given: SEEN.append(len(given[1][0])))


@pytest.mark.parametrize(
    ("loss_of", "options", "runs"),
    [
        (usual, {}, 0),
        (with_kept, {"keeps": True}, 3),
        (usual, {"prepare": look_into_it}, 3),
        (twice, {}, 0),
        (twice, {"writes": True}, 0),
        (usual, {"writes": True}, 0),
    ],
    ids=["alone", "kept", "hooked", "twice", "twice and written to", "written to"],
)
def test_it_runs_only_where_it_is_missed(
    loss_of: Callable[[Any, Tensor, Tensor], Tensor], options: dict[str, Any], runs: int
) -> None:
    plain, *_ = train(loss_of, is_served=False, **options)
    ours, hits, num_runs = train(loss_of, is_served=True, **options)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in ours.items())
    assert hits >= NUM_SAMPLES and num_runs == runs
    if options.get("prepare"):
        assert SEEN[-runs:] == [BATCH_SIZE] * runs

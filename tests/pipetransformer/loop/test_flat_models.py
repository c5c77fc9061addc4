"""A flat `nn.Sequential`, with a head at its end, is cut in `attach` as in the Trainer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import freeze as freezing
from freeze import FreezeContext
from pipetransformer import Trainer, attach
from pipetransformer.model import adapt

NUM, WORDS = 12, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.gelu(self.inner(self.norm(hidden)))


def of_words(*, shares: bool = False) -> nn.Sequential:
    """Build a model with children that have no weights, of which one may be used twice."""
    torch.manual_seed(0)
    relu = nn.ReLU()
    between = [relu, relu] if shares else [nn.ReLU(), nn.Dropout(0.3)]
    model = nn.Sequential(
        nn.Embedding(WORDS, 8), Block(), between[0], Block(), between[1], Block(),
        nn.Linear(8, WORDS),
    )  # fmt: skip
    return model.double()


def of_numbers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(), nn.Tanh(), Block(), nn.Linear(8, 3)).double()


def samples(model: nn.Sequential) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model[0], nn.Embedding):
        words = torch.randint(WORDS, (NUM, 2, 6), generator=generator)
        return [(one[0], one[1]) for one in words]
    numbers = torch.randn(NUM, 8, generator=generator, dtype=torch.float64)
    return [(one, index % 3) for index, one in enumerate(numbers)]


def train(model: nn.Sequential, schedule: list[int], *, attached: bool) -> int:
    """Train an epoch for each entry; return the hits."""
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, hits = DataLoader(samples(model), batch_size=4, shuffle=True), 0
    cached = attach(model, freeze=schedule) if attached else None
    torch.manual_seed(2)
    for num_frozen in schedule:
        if cached is None:
            freezing.apply(model, num_frozen, layers=list(model)[:-1])
        for given, target in loader if cached is None else cached.epoch(loader):
            F.cross_entropy(model(given).flatten(0, -2), target.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        hits += 0 if cached is None else cached.stats.hits
    if cached is not None:
        cached.close()
    return hits


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        (of_words(), [1, 1, 4, 4, 5, 5, 0]),
        (of_words(), [6, 6]),
        (of_words(shares=True), [2, 2, 4, 4]),
        (of_numbers(), [0, 2, 2, 4, 4]),
    ],
    ids=["words", "all but the head", "a child used twice", "numbers"],
)
def test_a_flat_model_trains_from_rows_as_without(
    model: nn.Sequential, schedule: list[int]
) -> None:
    other = deepcopy(model)
    assert train(other, schedule, attached=False) == 0
    assert train(model, schedule, attached=True) > NUM
    for (name, ours), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("build", [of_words, of_numbers])
def test_the_head_is_no_block_in_attach_nor_in_the_trainer(build: Any) -> None:
    model = build()
    num_layers, seen = adapt(model).num_layers, list[int]()
    assert num_layers == len(model) - 1

    def all_of_them(context: FreezeContext) -> int:
        seen.append(context.num_layers)
        return context.num_layers

    loader, optimizer = DataLoader(samples(model), batch_size=4), SGD(model.parameters(), lr=0.1)
    for dry_run in (False, True):
        with attach(
            model, freeze=all_of_them, optimizer=optimizer, num_epochs=2, dry_run=dry_run
        ) as cached:
            for _ in range(2):
                for given, _ in cached.epoch(loader):
                    model(given).sum().backward()
                    optimizer.step()
    assert {*seen} == {num_layers}
    assert [p.requires_grad for p in model[-1].parameters()] == [True, True]
    with (
        attach(model, freeze=len(model)) as cached,
        pytest.raises(ValueError, match=f"asks for {len(model)} blocks, but .* has {num_layers}"),
    ):
        next(cached.epoch(loader))


def nested() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    return nn.Sequential(nn.Linear(8, 8), blocks, nn.Tanh(), nn.Linear(8, 3)).double()


def test_a_row_within_has_the_layers_in_attach_and_in_the_trainer() -> None:
    plain, own, theirs = nested(), nested(), nested()
    data, schedule = samples(plain), [0, 2, 2]
    torch.manual_seed(2)
    loader = DataLoader(data, batch_size=4)
    for model, cached in ((plain, None), (own, attach(own, freeze=schedule))):
        optimizer = SGD(model.parameters(), lr=0.1)
        for num_frozen in schedule:
            if cached is None:
                freezing.apply(model, num_frozen, layers=list(model[1]))
            for given, target in loader if cached is None else cached.epoch(loader):
                F.cross_entropy(model(given), target).backward()
                optimizer.step()
                optimizer.zero_grad()
        if cached is not None:
            assert cached.stats.hits == NUM
            cached.close()
    assert adapt(theirs).num_layers == 3
    with Trainer(
        theirs, data, epochs=3, optimizer=lambda named: SGD([p for _, p in named], lr=0.1),
        global_batch_size=4, sample_order=lambda _: torch.arange(NUM),
        freeze="schedule:0,2,2", loss_fn=F.cross_entropy,
    ) as trainer:  # fmt: skip
        trainer.fit()
    for name, expected in plain.state_dict().items():
        for model in (own, theirs):
            torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-9, atol=1e-9)

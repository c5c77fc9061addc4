"""What a user changes between two epochs, or keeps aside, is seen: numbers are as without rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

import freeze as freezing
from pipetransformer import attach

NUM, WIDTH, DEPTH, EPOCHS = 24, 8, 2, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Model(nn.Module):
    """Blocks, with what a user may turn on later: noise, another head, another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, 3)
        self.other, self.names = nn.Linear(WIDTH, 3), nn.Embedding(3, WIDTH)
        self.noise, self.share, self.order, self.aside = 0.0, 0.0, (0, 1, 2, 3), None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if labels is not None:
            x = x + self.names(labels)
        if self.training and self.noise:
            x = x + self.noise * torch.randn_like(x)
        lowest = x
        for place in self.order:
            x = self.blocks[place](x)
            lowest = x if place == 0 else lowest
        self.note(lowest)
        answer: Tensor = self.head(self.drop(x))
        return answer + self.share * self.other(lowest) if self.share else answer

    def note(self, lowest: Tensor) -> None:
        """Keep nothing of what block 0 returns."""


class Keeping(Model):
    def note(self, lowest: Tensor) -> None:
        self.aside = lowest


class Answering(Keeping):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        answer, lowest, self.aside = super().forward(x), self.aside, None
        return answer, SimpleNamespace(lowest=lowest)


def model(kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return kind().double()


def tensors(num: int = NUM) -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(num, WIDTH, generator=draws, dtype=torch.float64)
    return TensorDataset(x, torch.arange(num) % 3)


class Labelled(Dataset[Any]):
    """Samples by any attribute, and labels by one that is compared elsewhere."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)
        self.labels, self.scale, self.change = [n % 3 for n in range(NUM)], 1.0, nn.Identity()

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        held = vars(self)
        return self.change((held.get("samples") or held["x"])[index] * self.scale), index % 3


class Cut:
    def __init__(self) -> None:
        self.num = 3

    def __call__(self, items: list[Any]) -> Any:
        x, y = map(
            torch.tensor, zip(*((one[0].tolist(), int(one[1])) for one in items), strict=True)
        )
        return torch.where(torch.arange(WIDTH) < self.num, x.double(), 0.0), y


Edit = Callable[[Any], None]
"""What a user does before an epoch, to the model or to the loader."""
Loss = Callable[[Any, Any], Tensor]


def sum_of(answer: Tensor, held: Any) -> Tensor:
    return answer.square().mean() + held.lowest.square().mean()


def usual(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def train(
    net: Model,
    loader: DataLoader[Any],
    *,
    attached: bool,
    edit: tuple[int, Edit] = (EPOCHS, lambda _: None),
    loss: Loss = usual,
    most: int | None = None,
) -> tuple[list[float], list[int]]:
    """Train; return all losses, and each epoch's hits."""
    torch.manual_seed(2)
    cached = attach(net, freeze=DEPTH) if attached else None
    optimizer = AdamW(net.parameters(), lr=0.01)
    losses, hits = list[float](), list[int]()
    for epoch in range(EPOCHS):
        if epoch == edit[0]:
            edit[1](SimpleNamespace(net=net, loader=loader, data=loader.dataset))
        if cached is None:
            freezing.apply(net, DEPTH)
        batches: Iterable[Any] = loader if cached is None else cached.epoch(loader)
        for step, batch in enumerate(batches):
            if step == most:
                break
            value = loss(net, batch)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        hits.append(0 if cached is None else cached.stats.hits)
    if cached is not None:
        cached.close()
    return losses, hits


def assert_same(
    make: Callable[[], DataLoader[Any]], kind: type[Model] = Model, **how: Any
) -> list[int]:
    """Compare a training from rows with one without; return its hits by epoch."""
    expected, _ = train(model(kind), make(), attached=False, **how)
    losses, hits = train(model(kind), make(), attached=True, **how)
    assert losses == pytest.approx(expected, rel=1e-9, abs=1e-12)
    return hits


def loader_of(data: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(data(), **{"batch_size": 8, "shuffle": True, **options})


def sets(name: str, value: Any, of: str = "net") -> tuple[int, Edit]:
    return 3, lambda loop: setattr(getattr(loop, of), name, value)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Model, lambda net, batch: F.cross_entropy(net(batch[0], labels=batch[1]), batch[1])),
        (Keeping, lambda net, batch: usual(net, batch) + net.other(net.aside).square().mean()),
        (
            Answering,
            lambda net, batch: (
                net(batch[0])[1].lowest.square().mean() + net(batch[0])[0].square().mean()
            ),
        ),
    ],
    ids=["labels of a tuple below the blocks", "kept on the model", "an object in the answer"],
)
def test_what_rows_lack_keeps_them_away(kind: type[Model], loss: Loss, caplog: Any) -> None:
    assert sum(assert_same(loader_of(tensors), kind, loss=loss)) == 0
    assert "no cache" in caplog.text


@pytest.mark.parametrize("place", ["blocks.0", "blocks.1.inner"])
def test_a_hook_that_would_see_rows_keeps_them_away(place: str, caplog: Any) -> None:
    def hooked(net: Any, batch: Any) -> Tensor:
        seen: list[Tensor] = []
        handle = net.get_submodule(place).register_forward_hook(
            lambda _module, _given, answer: seen.append(answer)
        )
        value = usual(net, batch)
        handle.remove()
        return value + 0.1 * net.other(seen[0]).square().mean()

    assert_same(loader_of(tensors), loss=hooked)


@pytest.mark.parametrize(
    "edit",
    [sets("noise", 0.1), sets("share", 0.5), sets("order", (2, 0, 1, 3))],
    ids=["noise", "a head on a frozen block", "another order"],
)
def test_rows_end_where_a_changed_attribute_makes_them_wrong(
    edit: tuple[int, Edit], caplog: Any
) -> None:
    hits = assert_same(loader_of(tensors), edit=edit)
    assert hits[2] == NUM and hits[-1] == 0
    assert "no cache from now on" in caplog.text


def test_an_attribute_that_changes_nothing_costs_one_epoch_of_rows() -> None:
    hits = assert_same(loader_of(tensors), edit=sets("aside", "a note"))
    assert hits[2] == hits[4] == NUM and hits[3] < NUM


def test_a_model_that_is_changed_again_and_again_has_no_rows(caplog: Any) -> None:
    def noting(net: Any, batch: Any) -> Tensor:
        value = usual(net, batch)
        net.aside = value.item()
        return value

    assert assert_same(loader_of(tensors), loss=noting)[-1] == 0
    assert "'aside' of Model was changed again" in caplog.text


@pytest.mark.parametrize(
    ("make", "edit"),
    [
        (
            loader_of(lambda: Labelled(samples=list(tensors().tensors[0]))),
            lambda loop: [one.mul_(2) for one in loop.data.samples],
        ),
        (
            loader_of(lambda: Labelled(x=tensors().tensors[0])),
            lambda loop: setattr(loop.data, "change", torch.tanh),
        ),
        (
            loader_of(lambda: Subset(tensors(2 * NUM), [*range(NUM)])),
            lambda loop: setattr(loop.data, "indices", [*range(NUM, 2 * NUM)]),
        ),
        (
            lambda: DataLoader(tensors(), 8, shuffle=True, collate_fn=Cut()),
            lambda loop: setattr(loop.loader.collate_fn, "num", 5),
        ),
    ],
    ids=["a list of many tensors", "a transform", "indices of a subset", "collate_fn"],
)
def test_samples_that_are_others_are_noticed(
    make: Callable[[], DataLoader[Any]], edit: Edit, caplog: Any
) -> None:
    hits = assert_same(make, edit=(3, edit))
    assert hits[2] == hits[4] == NUM and "computed anew" in caplog.text


def test_workers_read_what_the_data_set_has_become(caplog: Any) -> None:
    make = loader_of(lambda: Labelled(x=tensors().tensors[0]), num_workers=1)
    hits = assert_same(make, edit=sets("scale", 2.0, of="data"))
    assert hits[2] == hits[4] == NUM and "'scale' of Labelled was changed" in caplog.text


class Hardest(Sampler[list[int]]):
    """Draw the samples whose losses are highest, which the loop notes."""

    def __init__(self) -> None:
        self.losses = torch.arange(NUM) * 1e-6

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(3):
            ids = self.losses.topk(8).indices
            self.losses[ids] -= 1.0
            yield ids.tolist()


class GoingOn(Sampler[int]):
    """Go on where the last epoch was left."""

    def __init__(self, data: Sized) -> None:
        self.data, self.place = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self.data)):
            self.place = (self.place + 7) % NUM
            yield self.place


def test_a_sampler_of_the_user_s_own_draws_when_the_loop_asks() -> None:
    def hardest(net: Any, batch: Any) -> Tensor:
        x, y, ids = batch
        own = F.cross_entropy(net(x), y, reduction="none")
        samplers[-1].losses[ids] = own.detach().float()
        return own.mean()

    samplers: list[Hardest] = []

    def make() -> DataLoader[Any]:
        samplers.append(Hardest())
        data = TensorDataset(*tensors().tensors, torch.arange(NUM))
        return DataLoader(data, batch_sampler=samplers[-1])

    assert sum(assert_same(make, loss=hardest)) > 0

    def resumed() -> DataLoader[Any]:
        data = tensors()
        return DataLoader(data, batch_sampler=BatchSampler(GoingOn(data), 4, False))

    assert sum(assert_same(resumed, most=2)) > 0


class Noisy:
    """Add noise from a generator that is made when it is first used."""

    draws: np.random.Generator | None = None

    def __call__(self, items: list[Any]) -> Any:
        self.draws = self.draws or np.random.default_rng(0)
        return noisy(items, self.draws)


def noisy(items: list[Any], draws: np.random.Generator) -> Any:
    x, y = default_collate(items)
    return x + torch.from_numpy(draws.standard_normal(x.shape)), y


def closed_over(draws: np.random.Generator) -> Callable[[list[Any]], Any]:
    return lambda items: noisy(items, draws)


@pytest.mark.parametrize(
    "collate",
    [
        Noisy,
        lambda: partial(noisy, draws=np.random.default_rng(0)),
        lambda: closed_over(np.random.default_rng(0)),
    ],
    ids=["made at first use", "a partial's", "a closure's"],
)
def test_a_look_moves_no_generator_of_a_collate_fn(collate: Callable[[], Any]) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(tensors(), 8, shuffle=True, collate_fn=collate())

    assert sum(assert_same(make)) == 0


def test_weights_written_behind_a_fill_are_compared() -> None:
    net, loader, found = model(), loader_of(tensors)(), []
    for has_rows in (False, True):
        net = model()
        torch.manual_seed(2)
        with attach(net, freeze=DEPTH, cache=has_rows) as cached:
            if has_rows:
                cached.fill(loader)
            for parameter in net.blocks.parameters():
                parameter.data.mul_(1.5)
            torch.manual_seed(2)
            found.append([usual(net, batch).item() for batch in cached.epoch(loader)])
    assert found[1] == pytest.approx(found[0], rel=1e-9)

"""A loop of one's own trains to the same numbers with rows as without, and computes less."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import freeze as freezing
from pipetransformer import Trainer, attach
from pipetransformer.loop import CachedLoop
from tests.helpers.any_models import KINDS, NUM_SAMPLES, Kind, build, data, mean_loss, sgd
from tests.helpers.marks import slow
from tests.helpers.pool import Pool

PLAN = (0, 1, 2, 1, 2)
TEXTS = KINDS["gpt2_classifier"]


class Samples:
    """Give mappings, and count reads."""

    def __init__(self, entries: dict[str, Tensor]) -> None:
        self.entries, self.reads = entries, 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        return {name: entry[index].clone() for name, entry in self.entries.items()}


@dataclass
class Run:
    """Hold what a loop came to."""

    losses: list[float]
    weights: dict[str, Tensor]
    hits: list[int]


def frozen_names(kind: Kind, model: nn.Module, num_frozen: int) -> list[str]:
    bottom = (*kind.bottom, *(f"{kind.blocks}.{i}." for i in range(num_frozen)))
    return [n for n, _ in model.named_parameters() if num_frozen and n.startswith(bottom)]


def run(kind: Kind, *, folder: Path | None, dataset: Any = None, **settings: Any) -> Run:
    """Train by hand, with rows in a folder or without."""
    model = build(kind)
    dataset = Samples(dict(data(kind).tensors)) if dataset is None else dataset
    optimizer, found = sgd([*model.named_parameters()]), Run([], {}, [])
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4, shuffle=True)
    torch.manual_seed(3)
    cached = None
    if folder is not None:
        cached = attach(model, freeze=PLAN, cache_folder=folder, **settings)
    for num_frozen in PLAN:
        batches: Iterator[Any] = iter(loader) if cached is None else cached.epoch(loader)
        if cached is None:
            freezing.apply(model, num_frozen, layers=[*model.get_submodule(kind.blocks)])
        for step, batch in enumerate(batches):
            if cached is None and step == 0:
                for name in frozen_names(kind, model, num_frozen):
                    model.get_parameter(name).requires_grad_(False)
                    model.get_parameter(name).grad = None
            loss = mean_loss(kind, model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.losses.append(loss.item())
        found.hits.append(cached.stats.hits if cached else 0)
    found.losses.append(float(torch.rand(())))  # Random numbers go on alike, too.
    if cached is not None:
        cached.close()
    found.weights = dict(model.state_dict())
    return found


@pytest.mark.parametrize("name", [slow("llama"), "deberta", "beit", slow("eva"), "swin"])
def test_rows_change_no_loss_and_no_weight(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    plain, ours = run(kind, folder=None), run(kind, folder=tmp_path)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-9, abs=0)
    for key, tensor in ours.weights.items():
        allowed = 1e-9 + 1e-9 * float(plain.weights[key].abs().max())
        assert float((tensor - plain.weights[key]).abs().max()) <= allowed, key
    assert ours.hits[0] == 0 and min(ours.hits[1:]) > 0


def epochs(cached: CachedLoop, loader: DataLoader[Any], num: int) -> list[Any]:
    batches: list[Any] = []
    for _ in range(num):
        batches = list(cached.epoch(loader))
    return batches


@pytest.fixture
def vision(tmp_path: Path) -> Iterator[tuple[nn.Module, CachedLoop]]:
    model = build(KINDS["eva"]).eval()
    with attach(model, freeze=2, cache_folder=tmp_path) as cached:
        yield model, cached


def test_a_sample_that_hits_is_not_read_but_its_label_is(
    vision: tuple[nn.Module, CachedLoop],
) -> None:
    _, cached = vision
    entries = data(KINDS["eva"]).tensors
    dataset = TensorDataset(entries["x"], entries["y"].clone())
    loader = DataLoader(dataset, batch_size=5)
    epochs(cached, loader, 1)
    assert cached.stats.hits + cached.stats.misses == NUM_SAMPLES
    dataset.tensors[1][3] = 2 - dataset.tensors[1][3]
    batches = epochs(cached, loader, 1)
    assert cached.stats.hits == NUM_SAMPLES - 1  # The corrected one is made anew.
    assert torch.equal(torch.cat([y for _, y in batches]), dataset.tensors[1])
    # Nothing above the frozen blocks reads images: whoever else does must notice.
    with pytest.raises(ValueError, match="'isnan' was asked of '0', which was not read"):
        batches[0][0].isnan()


@pytest.mark.parametrize("added", [0, 1])
def test_items_of_a_table_that_hit_are_not_read_if_its_column_holds_their_labels(
    vision: tuple[nn.Module, CachedLoop], added: int
) -> None:
    _, cached = vision
    entries, reads = data(KINDS["eva"]).tensors, []

    def images(batch: dict[str, Any]) -> dict[str, Any]:
        reads.extend(batch["place"])
        found = [entries["x"][place] for place in batch["place"]]
        return {"x": found, "y": [(label + added) % 3 for label in batch["y"]]}

    columns = {"place": [*range(NUM_SAMPLES)], "y": entries["y"].tolist()}
    dataset: Any = datasets.Dataset.from_dict(columns).with_transform(images)
    loader = DataLoader(dataset, batch_size=5)
    epochs(cached, loader, 1)
    reads.clear()
    batches = epochs(cached, loader, 1)
    assert cached.stats.hits == NUM_SAMPLES
    # Some that hit are read as they are due to be checked; all are where labels are made anew.
    assert len(reads) == NUM_SAMPLES if added else len(reads) < NUM_SAMPLES // 2
    labels = torch.cat([batch["y"] for batch in batches])
    assert torch.equal(labels, (entries["y"] + added) % 3)


def test_random_samples_are_not_cached(
    vision: tuple[nn.Module, CachedLoop], caplog: pytest.LogCaptureFixture
) -> None:
    model, cached = vision

    class Augmented(Samples):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            item = super().__getitem__(index)
            return {**item, "x": item["x"] + torch.rand(())}

    entries = data(KINDS["eva"]).tensors
    loader: DataLoader[Any] = DataLoader(
        Augmented({"x": entries["x"], "labels": entries["y"]}), batch_size=5
    )
    epochs(cached, loader, 2)
    assert cached.stats.hits == cached.stats.misses == 0
    assert "no cache: the training set gives other values each time" in caplog.text
    assert not any(p.requires_grad for p in model.blocks[1].parameters())


def test_the_model_runs_from_its_start_outside_of_batches_and_after_the_end(
    vision: tuple[nn.Module, CachedLoop],
) -> None:
    model, cached = vision
    x = data(KINDS["eva"]).tensors["x"][:5]
    expected = model(x)
    loader = DataLoader(TensorDataset(x, torch.zeros(5, dtype=torch.long)), batch_size=5)
    epochs(cached, loader, 2)
    assert torch.equal(model(x), expected)
    cached.close()
    assert torch.equal(model(x), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_settings_and_depths_that_are_impossible_are_refused(tmp_path: Path) -> None:
    model = build(KINDS["eva"])
    with pytest.raises(ValueError, match=r"unknown setting\(s\) epochs; known: cache_folder"):
        attach(model, freeze=1, epochs=3)
    with pytest.raises(ValueError, match="cache_foldr; did you mean 'cache_folder'[?]$"):
        attach(model, freeze=1, cache_foldr=tmp_path)
    with pytest.raises(ValueError, match="freeze is 'all'; give a number of blocks") as caught:
        attach(model, freeze="all")  # type: ignore[arg-type]
    assert str(caught.value).count("plasticity[:0.2]") == 1
    entries = data(KINDS["eva"]).tensors
    loader = DataLoader(TensorDataset(entries["x"], entries["y"]), batch_size=5)
    with attach(model, freeze=7, cache_folder=tmp_path) as cached:
        with pytest.raises(ValueError, match="freeze asks for 7 blocks, but the model has 3"):
            next(cached.epoch(loader))


def distributed(folder: Path | None) -> tuple[list[float], dict[str, Tensor], int]:
    """Train under DistributedDataParallel, wrapped anew where layers freeze."""
    kind = KINDS["gpt2_classifier"]
    model, dataset = build(kind), Samples(dict(data(kind).tensors))
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=2, sampler=sampler)
    optimizer, losses, hits = sgd([*model.named_parameters()]), [], 0
    cached = attach(model, freeze=(2, 2), cache_folder=folder) if folder else None
    freezing.apply(model, 2, layers=[*model.get_submodule(kind.blocks)])
    wrapped = DistributedDataParallel(model)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches: Iterator[Any] = iter(loader) if cached is None else cached.epoch(loader)
        for batch in batches:
            loss = mean_loss(kind, wrapped, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        hits = cached.stats.hits if cached else 0
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if cached is not None:
        cached.close()
    return losses, weights, hits


@pytest.mark.slow
def test_replicas_share_their_rows_and_end_as_without(two_ranks: Pool, tmp_path: Path) -> None:
    ours, plain = two_ranks.run(distributed, tmp_path), two_ranks.run(distributed, None)
    for (losses, weights, hits), (expected, others, _) in zip(ours, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-9, abs=0)
        # Most samples of the second epoch were another rank's in the first.
        assert hits >= 4
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], rtol=1e-9, atol=1e-12)


def test_images_without_labels_serve_a_loss_that_needs_none(
    vision: tuple[nn.Module, CachedLoop],
) -> None:
    model, cached = vision
    loader = DataLoader(TensorDataset(data(KINDS["eva"]).tensors["x"]), batch_size=5)
    found = [torch.cat([model(x) for (x,) in cached.epoch(loader)]) for _ in range(2)]
    assert cached.stats.hits == NUM_SAMPLES
    assert torch.equal(*found)


def test_hits_are_told_while_an_epoch_runs_and_after_a_break(tmp_path: Path) -> None:
    model, loader = build(TEXTS), DataLoader(data(TEXTS), batch_size=4)
    with attach(model, freeze=1, cache_folder=tmp_path) as cached:
        for epoch in range(2):
            batches, seen = cached.epoch(loader), 0
            for batch in batches:
                mean_loss(TEXTS, model, batch)
                seen += len(batch["input_ids"])
                found = cached.stats
                assert found.hits + found.misses >= seen
                if epoch and seen == 8:
                    break
        last = cached.stats.hits
        assert last > 0
    assert cached.stats.hits == last


def test_a_model_s_name_in_its_place_is_refused_at_once() -> None:
    for begin in (lambda: attach("bert", freeze=1), lambda: Trainer("bert", [(1, 1)])):
        with pytest.raises(TypeError, match=r"model is a str .*; build or .*pretrained\('bert'\)"):
            begin()  # type: ignore[no-untyped-call]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data(TEXTS))


def test_a_loader_of_a_stream_is_refused_and_of_its_list_is_served() -> None:
    with attach(build(TEXTS), freeze=1) as cached:
        with pytest.raises(TypeError, match="a Stream, is iterable, .* for instance list"):
            next(iter(cached.epoch(DataLoader(Stream(), batch_size=4))))
        batch = next(iter(cached.epoch(DataLoader([*Stream()], batch_size=4))))
        assert len(next(iter(batch.values()))) == 4


def test_an_attached_loop_whose_epoch_nobody_runs_is_told_of_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop() -> CachedLoop:
        return attach(build(TEXTS), freeze=1)

    used = loop()
    next(iter(used.epoch(DataLoader(data(TEXTS), batch_size=4))))
    used.close()
    assert not caplog.text
    loop().close()
    assert caplog.text.count("over cached.epoch(loader) in the place of loader") == 1
    dropped = loop()
    del dropped
    gc.collect()
    assert caplog.text.count("over cached.epoch(loader) in the place of loader") == 2

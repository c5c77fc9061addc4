"""Rows serve loaders of any kind, which go on in their own way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, RandomSampler

from pipetransformer.loop.batches.loaders import base_of, giving_indices
from tests.helpers.any_models import KINDS, data
from tests.pipetransformer.loop.test_cached_loop import Samples
from tests.pipetransformer.loop.test_foreign_loops import Loop, assert_equal

TEXTS = KINDS["gpt2_classifier"]


@pytest.fixture
def loop(tmp_path: Path) -> Any:
    loop = Loop(TEXTS, tmp_path, None)
    yield loop
    loop.cached.close()


class Reversed(DataLoader[Any]):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


class LooksAhead(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = super().__iter__()
        ahead = next(batches)
        for batch in batches:
            yield ahead
            ahead = batch
        yield ahead


def texts_of(kind: type[DataLoader[Any]]) -> DataLoader[Any]:
    return kind(Samples(dict(data(TEXTS).tensors)), batch_size=3, shuffle=True)


def by_accelerate() -> Any:
    return accelerate.Accelerator(cpu=True).prepare_data_loader(texts_of(DataLoader))


@pytest.mark.parametrize(
    "make",
    [
        lambda: texts_of(LooksAhead),
        by_accelerate,
        lambda: accelerate.skip_first_batches(by_accelerate(), 1),
    ],
    ids=["looks_ahead", "accelerate", "accelerate_skips"],
)
def test_rows_serve_a_loader_that_looks_one_batch_ahead(
    make: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops: list[Loop] = []
    assert_equal(lambda loop: (loops.append(loop), loop.train(3))[0], TEXTS, tmp_path, make)
    assert loops[1].cached.stats.hits >= 7
    assert "given other inputs" not in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_samples_are_as_accelerate_draws_them(rank: int) -> None:
    # Its sampler ends with a last batch that is to be shared, and counts an epoch: begun anew, it
    # gave each epoch the next one's order.
    def make() -> Any:
        return prepare_data_loader(
            DataLoader[Any](list(range(12)), batch_size=4, shuffle=True),  # type: ignore[arg-type]
            num_processes=2, process_index=rank, use_seedable_sampler=True, data_seed=5,
        )  # fmt: skip

    plain, served, announced = make(), make(), list[Any]()
    for _ in range(3):
        with giving_indices(base_of(served), announced.append, torch.tensor, draws=True):
            batches = [batch.tolist() for batch in served]
        assert batches == announced[-1] == [batch.tolist() for batch in plain]


def test_batches_that_were_taken_long_ago_run_from_the_start(tmp_path: Path) -> None:
    assert_equal(Loop.train, TEXTS, tmp_path, lambda: texts_of(Reversed))


class Dispatched(DataLoader[Any]):
    """Stand for accelerate's loader of that name."""


Dispatched.__name__ = "DataLoaderDispatcher"


def test_a_loader_whose_samples_are_not_known_is_refused(loop: Loop) -> None:
    for make, message in (
        (lambda: texts_of(Dispatched), "has rank 0 read for all ranks"),
        (lambda: [1, 2], "a list is no torch DataLoader"),
    ):
        with pytest.raises(TypeError, match=message):
            next(loop.cached.epoch(make()))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["_iterator", "prefetch_factor", "dataset"])
def test_a_field_that_another_torch_s_loaders_lack_is_named(loop: Loop, name: str) -> None:
    # It was a bare KeyError of the field's name, in the midst of an epoch.
    loader = texts_of(DataLoader)
    del vars(loader)[name]
    named = (
        rf"a DataLoader of torch {re.escape(torch.__version__)}, has no field '{name}' of its own"
    )
    with pytest.raises(RuntimeError, match=named):
        next(loop.cached.epoch(loader))


def test_a_loader_s_way_to_start_workers_is_its_own_again(loop: Loop) -> None:
    samples = Samples(dict(data(TEXTS).tensors))
    loader = DataLoader(samples, batch_size=3, num_workers=1, multiprocessing_context="fork")
    context = loader.multiprocessing_context
    batches = loop.cached.epoch(loader)
    next(batches)
    assert loader.multiprocessing_context is context is not None
    batches.close()


def leaves_after_two(loop: Loop) -> None:
    for _ in range(3):
        batches = iter(loop.cached.epoch(loop.loader))
        for _ in range(len(loop.loader)):  # And never asks whether there is one more.
            loop.step(next(batches))


@pytest.mark.parametrize("do", [leaves_after_two, lambda loop: loop.train(3)])
def test_a_generator_that_is_shared_draws_as_without_rows(
    do: Callable[[Loop], None], tmp_path: Path
) -> None:
    def make() -> DataLoader[Any]:
        samples = Samples(dict(data(TEXTS).tensors))
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(samples, generator=generator)
        return DataLoader(samples, batch_size=5, sampler=sampler, generator=generator)

    assert_equal(do, TEXTS, tmp_path, make)


def test_a_loader_is_as_it_was_once_its_epoch_has_begun(loop: Loop) -> None:
    before = dict(vars(loop.loader))
    batches = loop.cached.epoch(loop.loader)
    next(batches)
    assert vars(loop.loader) == before
    (whole, *_) = loop.loader  # For an evaluation on the same samples, say.
    assert loop.loss(whole).requires_grad
    batches.close()


class Eager:
    """Draw an epoch's order when it is begun, and not at its first batch."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(torch.randperm(10).view(5, 2).tolist())


def test_a_sampler_draws_when_it_would(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        samples = Samples(dict(data(TEXTS).tensors))
        return DataLoader(samples, batch_sampler=Eager())  # type: ignore[arg-type]

    def train(loop: Loop) -> None:
        loop.train(3)
        loop.numbers.append(float(torch.rand(())))

    assert_equal(train, TEXTS, tmp_path, make)

"""Prove that workers read what is read without them, and what they foresee."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from freeze import FreezeContext, FreezeDecision
from pipetransformer.feed import Batch, Collation, ForeseenSamples, Request, Samples
from pipetransformer.feed.fetch_forecast import Fetch, Follower, with_later
from tests.helpers.marks import slow
from tests.helpers.models import tiny_data, tiny_trainer


class Noisy:
    """Samples that draw random numbers and know which process read them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError("sample 13 is damaged")
        if index == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"x": torch.rand(3) + np.random.rand() + index, "y": index, "pid": os.getpid()}


SAMPLES = Samples(Noisy(), Collation(("x", "y", "pid"), ("x",), ("y",)), seed=3)


class Plan:
    """Requests to come, and how often they were asked for."""

    def __init__(self, *requests: Request) -> None:
        self.requests = list(requests)
        self.begun = 0

    def __call__(self) -> Iterator[Request]:
        self.begun += 1
        yield from self.requests


def foreseen(plan: Plan, *, num: int = 2) -> ForeseenSamples:
    return ForeseenSamples(
        SAMPLES, plan, num_workers=num, prefetch_factor=2, pin_memory=False, timeout_s=60.0
    )


def assert_as_here(batch: Batch, ids: tuple[int, ...], view: int) -> None:
    """Compare a batch with what this process reads, but for the process."""
    expected = SAMPLES.read(ids, view=view)
    assert batch.keys() == expected.keys()
    assert torch.equal(batch["x"], expected["x"]) and torch.equal(batch["y"], expected["y"])


@pytest.mark.parametrize("num", [0, 1, 2])
def test_samples_and_their_random_numbers_are_the_same_for_any_number_of_workers(num: int) -> None:
    plan = Plan(*[((3 * n, 3 * n + 1), n % 2) for n in range(4)])
    samples = foreseen(plan, num=num)
    for ids, view in plan.requests:
        batch = samples.read(ids, view=view)
        assert_as_here(batch, ids, view)
        assert (batch["pid"] == os.getpid()).all() == (num == 0)
    assert plan.begun == (num > 0), "workers began anew"
    samples.close()


def test_other_samples_than_those_foreseen_make_workers_begin_anew() -> None:
    plan = Plan(*[((n,), 0) for n in range(6)])
    samples = foreseen(plan)
    samples.read((0,), view=0)
    plan.requests = [((30, 31), 5), ((32,), 5)]
    for ids, view in plan.requests:
        batch = samples.read(ids, view=view)
        assert_as_here(batch, ids, view)
        assert (batch["pid"] != os.getpid()).all()
    assert plan.begun == 2
    samples.close()


def test_samples_that_nobody_foresaw_are_read_here() -> None:
    samples = foreseen(Plan(((1,), 0)))
    batch = samples.read((40, 41), view=2)
    assert_as_here(batch, (40, 41), 2)
    assert (batch["pid"] == os.getpid()).all()
    assert_as_here(samples.read((1,), view=0), (1,), 0)
    samples.close()


def test_an_end_that_was_foreseen_begins_anew() -> None:
    plan = Plan(((1,), 0), ((2,), 0))
    samples = foreseen(plan)
    for _ in range(2):
        for ids, view in plan.requests:
            assert (samples.read(ids, view=view)["pid"] != os.getpid()).all()
    assert plan.begun == 2
    samples.close()


def test_an_error_of_a_worker_is_raised_at_the_step_that_needs_its_sample() -> None:
    samples = foreseen(Plan(((1,), 0), ((13,), 0)))
    samples.read((1,), view=0)
    with pytest.raises(ValueError, match="sample 13 is damaged"):
        samples.read((13,), view=0)
    samples.close()


def test_a_worker_that_dies_ends_the_read_with_its_number() -> None:
    samples = foreseen(Plan(((14,), 0)), num=1)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(?s?\)? ?\d+\)"):
        samples.read((14,), view=0)
    samples.close()


def test_closing_leaves_no_process_behind() -> None:
    before = set(multiprocessing.active_children())
    samples = foreseen(Plan(((1,), 0), ((2,), 0)))
    samples.read((1,), view=0)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    samples.close()
    assert not any(worker.is_alive() for worker in workers)


def test_a_field_that_another_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    end: Any = _MultiProcessingDataLoaderIter._shutdown_workers
    monkeypatch.delattr(_MultiProcessingDataLoaderIter, "_shutdown_workers")
    samples = foreseen(Plan(((1,), 0)))
    named = rf"of torch {re.escape(torch.__version__)} has no field '_shutdown_workers'.*workers=0"
    with pytest.raises(RuntimeError, match=named):
        samples.read((1,), view=0)
    assert samples._loader is not None
    end(samples._loader._iterator)
    monkeypatch.undo()  # Before the iterator is collected, which asks for it.


def test_the_callers_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    samples = foreseen(Plan(((1,), 0)))
    samples.read((1,), view=0)
    samples.close()
    assert torch.equal(torch.rand(2), expected)


STEPS = [(epoch, torch.arange(first, first + 2)) for epoch in (0, 1) for first in range(0, 24, 2)]


def test_what_is_later_ends_with_the_epoch_and_after_some_fetches() -> None:
    fetches = list(with_later(STEPS))
    assert [(fetch.epoch, fetch.ids.tolist()) for fetch in fetches] == [
        (epoch, ids.tolist()) for epoch, ids in STEPS
    ]
    assert fetches[0].later_ids(8).tolist() == [*range(2, 18)]
    assert len(fetches[0].later) == 11
    assert fetches[9].later_ids(8).tolist() == [20, 21, 22, 23]
    assert fetches[11].later_ids(8).tolist() == []
    assert fetches[12].later_ids(8).tolist() == [*range(2, 18)]


def test_fetches_are_followed_and_others_begin_anew() -> None:
    begun = []

    def to_come() -> list[tuple[int, Tensor]]:
        begun.append(position)
        return STEPS[position:]

    def later(epoch: int, ids: Tensor) -> list[int]:
        fetch = fetches.next_one(lambda f: f.epoch == epoch and torch.equal(f.ids, ids))
        return [] if fetch is None else fetch.later_ids(8).tolist()

    position = 0
    fetches: Follower[Fetch] = Follower(lambda: with_later(to_come()))
    assert later(*STEPS[0])[:2] == [2, 3]
    assert later(*STEPS[1])[:2] == [4, 5]
    position = 6
    assert later(*STEPS[6])[:2] == [14, 15]
    assert begun == [0, 6]
    assert not later(0, torch.tensor([5, 9]))
    position = 3
    fetches.forget()
    assert later(*STEPS[3])[:2] == [8, 9]
    assert begun == [0, 6, 6, 3]


NUM_SAMPLES = 60


EPOCHS = 6


@pytest.mark.parametrize(
    ("global_batch_size", "settings", "frozen"),
    [
        (7, {}, {0: 0, 9: 2}),
        slow(8, {"cache_limit_bytes": 20_000}, {0: 2}),
        slow(10, {"prefix_chunk": 16}, {0: 0, 2: 1, 4: 2, 9: 3}),
    ],
)
def test_workers_begin_anew_once_an_epoch_at_most(
    global_batch_size: int,
    settings: dict[str, Any],
    frozen: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    begin = ForeseenSamples._begin

    def counted(samples: ForeseenSamples) -> Any:
        begun.append(trainer.global_step)
        return begin(samples)

    def freeze(context: FreezeContext) -> FreezeDecision:
        latest = max(step for step in frozen if step <= context.step)
        return FreezeDecision(frozen[latest], "by step")

    monkeypatch.setattr(ForeseenSamples, "_begin", counted)
    with tiny_trainer(
        data=tiny_data(num_samples=NUM_SAMPLES),
        freeze=freeze,
        freeze_interval_steps=1,
        epochs=EPOCHS,
        global_batch_size=global_batch_size,
        num_workers=1,
        **settings,
    ) as trainer:
        trainer.fit()
        report = trainer.report
    assert report.cache_hits
    per_epoch = -(-NUM_SAMPLES // global_batch_size)
    by_epoch = [sum(step // per_epoch == epoch for step in begun) for epoch in range(EPOCHS)]
    changes = [sum(step // per_epoch == epoch for step in frozen) for epoch in range(EPOCHS)]
    assert all(num <= 1 + more for num, more in zip(by_epoch, changes, strict=True)), begun

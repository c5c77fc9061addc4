"""Prove that workers read what is read without them, ahead where it was foreseen."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pipetransformer.feed import Batch, Collation, ForeseenSamples, Request, Samples


class Noisy:
    """Samples that draw random numbers and know which process read them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError("sample 13 is damaged")
        if index == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return {
            "x": torch.rand(3) + np.random.rand() + index,
            "y": index,
            "pid": os.getpid(),
        }


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


def test_the_callers_random_numbers_stay_as_they_were() -> None:
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    samples = foreseen(Plan(((1,), 0)))
    samples.read((1,), view=0)
    samples.close()
    assert torch.equal(torch.rand(2), expected)

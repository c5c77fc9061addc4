"""Rows of parts are kept where they pay, which is said before the first step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipetransformer import CachedLoop, attach
from tests.helpers.pool import Pool

NUM = 12
SECONDS = "pipetransformer.loop.rows.row_account._seconds"


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.tower(x))
        return answer


def _epoch(model: nn.Module, cached: CachedLoop) -> None:
    samples = [{"x": torch.full((4,), float(index))} for index in range(NUM)]
    for _ in range(2):
        for batch in cached.epoch(DataLoader(samples, batch_size=4)):
            model(batch["x"]).sum().backward()


def _lasting(*seconds: float) -> Callable[..., float]:
    """Have computing rows, a step from rows, and a step take this long."""
    left = list(seconds)

    def run(step: Callable[[], Any], _: object) -> float:
        step()
        return left.pop(0)

    return run


@pytest.mark.parametrize(
    ("cache", "whole_s", "hits"),
    [(None, 0.0109, 0), (None, 0.0112, NUM), (True, 0.0109, NUM), (False, 1.0, 0)],
)
def test_rows_are_kept_where_they_save_a_tenth_of_a_step_or_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, cache: bool | None, whole_s: float, hits: int
) -> None:
    monkeypatch.setattr(SECONDS, _lasting(0.001, 0.01, whole_s))
    model = _Model()
    with attach(model, parts=["tower"], cache=cache) as cached:
        _epoch(model, cached)
        assert cached.stats.hits == hits
    assert not model.tower.training
    assert model.tower[0].weight.grad is None


def test_an_account_says_rows_bytes_times_and_from_when_it_pays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SECONDS, _lasting(0.025, 0.01, 0.02))
    caplog.set_level(logging.INFO)
    model = _Model()
    before = [p.clone() for p in (*model.parameters(), *model.buffers())]
    loader = DataLoader([{"x": torch.ones(4)}] * NUM, batch_size=4)
    torch.manual_seed(0)
    next(iter(loader))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with attach(model, parts=["tower"]) as cached:
        next(cached.epoch(loader))
    # Computing rows takes 15 ms more than a step saves, in each batch of the first epoch.
    text = "rows of 'tower': forward and backward of 4 samples take 20.0 ms, from rows 10.0 ms; "
    assert text + "this saves 50 % of an epoch, and pays from epoch 3 on, in " in caplog.text
    # A row has its sample's digest beside 32 bytes, and its tag.
    assert re.search(r"the cache has rows of 12 of 12 samples, about \S+ KiB", caplog.text)
    for was, now in zip(before, (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(was, now)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_pay_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SECONDS, _lasting(0.001, 0.01, 0.0105))
    model = _Model()
    with attach(model, parts=["tower"]) as cached:
        _epoch(model, cached)
    assert caplog.text.count("saves 5 % of it, so the part runs at every step; cache=True") == 1


def _hits_where_only_rank_0_saves() -> int:
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SECONDS, _lasting(0.001, 0.01, 0.01 if rank else 1.0))
        model = _Model()
        with attach(model, parts=["tower"]) as cached:
            _epoch(model, cached)
            return cached.stats.hits


def test_processes_agree_on_what_pays(two_ranks: Pool) -> None:
    assert two_ranks.run(_hits_where_only_rank_0_saves) == [NUM, NUM]


def test_an_odd_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="give True, False"):
        attach(_Model(), parts=["tower"], cache="yes")

"""Prove that changed samples are noticed in any order, and that rows are rounded once.

Every fourth hit by a running count was checked: in a sequential order, whose length four divides,
the same quarter for ever. And a row in a smaller dtype was rounded at each depth that it passed,
where a resumed run, which computes it anew, rounds it once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import autocache.sample_checks
from pipetransformer import FreezeSchedule, Trainer
from tests.helpers.inspection import feed_of, store_of
from tests.helpers.loops import TINY, make_trainer, sgd
from tests.helpers.measured import freely, measuring
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.unusual import Layer

_EPOCHS, _NUM = 6, 8


class Changing:
    """Give samples of which all but every fourth change from epoch to epoch."""

    def __init__(self, changes: bool) -> None:
        self.data, self.epoch, self.changes = tiny_data(), 0, changes

    def __len__(self) -> int:
        return _NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return (x + self.epoch if self.changes and index % 4 != 3 else x), y


def run(data: Any, *, frozen: tuple[int, ...] = (2,) * _EPOCHS, **settings: Any) -> list[float]:
    losses: list[float] = []
    with Trainer(
        tiny_model(),
        data,
        loss_fn=nn.CrossEntropyLoss(),
        freeze=lambda context: frozen[context.epoch],
        epochs=len(frozen),
        global_batch_size=8,
        **settings,
    ) as trainer:
        while not trainer.is_over:
            losses.append(trainer.step().loss)
            if isinstance(data, Changing):
                data.epoch = int(trainer.epoch)
    return losses


@pytest.mark.parametrize("check", ["sampled", "all"])
def test_samples_that_change_are_noticed_in_a_sequential_order(
    check: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"sample_order": lambda epoch: range(_NUM), "cache_check": check}
    cached = run(Changing(changes=True), **settings)
    assert caplog.text.count("gives another sample") == 1
    if check == "all":  # Before any of them is used.
        uncached = run(Changing(changes=True), **{**settings, "cache": False})
        assert cached == pytest.approx(uncached, rel=1e-12)


def test_all_checks_ask_for_every_sample_and_change_nothing() -> None:
    still = run(Changing(changes=False), cache_check="all")
    assert still == run(Changing(changes=False))


def test_a_resumed_run_with_rounded_rows_is_the_uninterrupted_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache_dtype": "float16", "checkpoint_every_epochs": 1}
    frozen = (1, 1, 2, 3)
    whole = run(tiny_data(), frozen=frozen, folder=tmp_path / "whole", **settings)
    # Its rows are gone: what was found at depth 1 is computed anew from the samples.
    part = Trainer(
        tiny_model(),
        tiny_data(),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=lambda context: frozen[context.epoch],
        epochs=len(frozen),
        global_batch_size=8,
        folder=tmp_path / "part",
        **settings,
    )
    with part:
        steps = part.max_steps
        for _ in range(steps // 2):
            part.step()
        part.stop()
        part.fit()
        to_come = steps - part.global_step
    resumed = run(tiny_data(), frozen=frozen, folder=tmp_path / "part", resume=True, **settings)
    assert resumed == whole[-to_come:] and to_come > 0


class Flickering(Dataset[tuple[Tensor, Tensor]]):
    """Give one sample in ten with noise, but none of those that are probed at the start."""

    def __init__(self, num_samples: int) -> None:
        self.data = tiny_data(num_samples=num_samples)
        self.probed = set(torch.linspace(0, num_samples - 1, 16).long().tolist())
        self.read = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        x, y = self.data[index]
        noisy = index % 10 == 3 and index not in self.probed
        return (x + torch.randn_like(x) if noisy else x), y


def test_augmentation_of_few_samples_ends_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    # Sixteen samples were read twice at the start; what changed among the others was cached, and
    # frozen, for good.
    data = Flickering(64)
    with (
        measuring(freely),
        caplog.at_level(logging.WARNING),
        tiny_trainer(
            data=data, freeze=FreezeSchedule([2]), epochs=4, global_batch_size=8
        ) as trainer,
    ):
        trainer.fit()
        assert store_of(trainer) is not None and store_of(trainer).is_condemned()
        data.read = 0
        feed_of(trainer).rows(4).fetch(torch.arange(8))
        assert data.read == 8
    assert trainer.report.cache_hits < 3 * 64
    warnings = [r.message for r in caplog.records if "gives another sample" in r.message]
    assert len(warnings) == 1


def test_the_chance_to_miss_rare_augmentation_is_what_is_said() -> None:
    # One sample in 200 changes; of 1,000 reads of a store of as many rows 250 are checked.
    checks = 1000 // autocache.sample_checks._DENSE_CHECKS
    assert (1 - 1 / 200) ** checks < 0.3


def test_a_missing_number_in_the_data_is_no_randomness(caplog: pytest.LogCaptureFixture) -> None:
    x, y = tiny_data().tensors
    with_gaps = torch.cat((x, torch.full((len(x), 1), torch.nan).double()), 1)
    assert with_gaps.isnan().any()

    def filled() -> nn.Module:
        model = tiny_model()
        first = Layer(lambda layer, hidden: hidden)
        first.forward = lambda hidden: model[0](hidden[:, :-1])  # type: ignore[method-assign]
        first.linear = model[0]
        return nn.Sequential(first, *list(model)[1:])

    job = replace(TINY, build=filled, data=lambda: TensorDataset(with_gaps, y), frozen=(1,))
    with make_trainer(replace(job, optimizer=sgd)) as trainer:
        trainer.step()
    assert "no cache" not in caplog.text

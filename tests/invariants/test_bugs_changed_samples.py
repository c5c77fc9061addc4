"""Prove that changed samples are noticed in any order, and that rows are rounded once.

Every fourth hit by a running count was checked: in a sequential order, whose length four divides,
the same quarter for ever. And a row in a smaller dtype was rounded at each depth that it passed,
where a resumed run, which computes it anew, rounds it once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from pipetransformer import Trainer
from tests.models import tiny_data, tiny_model

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

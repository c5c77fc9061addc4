"""Prove at which steps a run is saved, and its policy asked."""

from __future__ import annotations

from typing import Any

import pytest

from pipetransformer.config import TrainConfig
from pipetransformer.position import Position, Timeline


# 5 steps an epoch, 3 epochs.
@pytest.mark.parametrize(
    ("steps", "epochs", "due"),
    [
        (4, 0, [4, 8, 12, 15]),
        (0, 2, [10, 15]),
        (0, 1, [5, 10, 15]),
        (6, 2, [6, 10, 12, 15]),
        (100, 0, [15]),
    ],
)
def test_saves_are_due_by_steps_by_epochs_and_at_the_end(
    steps: int, epochs: int, due: list[int]
) -> None:
    settings = TrainConfig(
        folder="runs",
        epochs=3,
        global_batch_size=6,
        checkpoint_every_steps=steps,
        checkpoint_every_epochs=epochs,
    )
    timeline, found = Timeline(settings, 26, 1.0), []
    while not timeline.is_over:
        timeline.advance(min(6, 26 - timeline.position.sample))
        if timeline.save_due():
            found.append(timeline.position.step)
    assert found == due


# 5 steps an epoch, 4 epochs.
@pytest.mark.parametrize(
    ("interval", "due"),
    [
        ({}, [0, 5, 10, 15]),
        ({"freeze_interval_epochs": 2}, [0, 10]),
        ({"freeze_interval_epochs": 3}, [0, 15]),
        ({"freeze_interval_steps": 7}, [0, 7, 14]),
        ({"freeze_interval_share": 0.2}, [0, 4, 8, 12, 16]),
        # A share of what max_steps leaves of the run.
        ({"freeze_interval_share": 0.2, "max_steps": 15}, [0, 3, 6, 9, 12]),
        # Rounded to whole steps, one at least.
        ({"freeze_interval_share": 0.13}, [0, 3, 6, 9, 12, 15, 18]),
        ({"freeze_interval_share": 0.001}, list(range(20))),
        ({"freeze_interval_share": 1.0}, [0]),
    ],
    ids=str,
)
def test_decisions_are_due_by_epochs_by_steps_and_by_shares_of_the_run(
    interval: dict[str, Any], due: list[int]
) -> None:
    settings = TrainConfig(epochs=4, global_batch_size=6, **interval)
    timeline, found = Timeline(settings, 26, 1.0), [-1]
    while not timeline.is_over:
        if timeline.decision_due(found[-1]):
            found.append(timeline.position.step)
        assert not timeline.decision_due(found[-1])
        timeline.advance(min(6, 26 - timeline.position.sample))
    assert found[1:] == due


def test_samples_are_seen_last_in_the_epoch_in_which_max_steps_ends() -> None:
    timeline = Timeline(TrainConfig(epochs=9, max_steps=6, global_batch_size=4), 15, 0.1)
    seen = []
    for size in (4, 4, 4, 3, 4, 4):
        seen.append(timeline.sees_samples_last)
        timeline.advance(size)
    assert timeline.is_over
    assert seen == [False] * 4 + [True] * 2


def test_epochs_done_count_steps_and_with_max_steps_rates_follow_steps() -> None:
    config = TrainConfig(epochs=9, max_steps=6, global_batch_size=4)
    timeline = Timeline(config, 15, 0.1)
    # Half of the run was done with batches of another size.
    timeline.position = Position(step=3, epoch=1, sample=8)
    assert timeline.epochs_done(1) == 1.5
    steps = Timeline(config, 15, 0.1)
    steps.position = Position(step=3, epoch=0, sample=12)
    assert timeline.learning_rate_factor(1) == steps.learning_rate_factor(1)


def test_an_epoch_is_not_done_before_its_last_sample_after_a_batch_of_another_size() -> None:
    timeline = Timeline(TrainConfig(epochs=2, global_batch_size=5), 10, 0.1)
    timeline.position = Position(step=1, epoch=0, sample=1)
    found = []
    for size in (5, 4, 5, 5):
        timeline.advance(size)
        found.append(timeline.epochs_done(1))
    assert found == [0.5, 1.0, 1.5, 2.0]

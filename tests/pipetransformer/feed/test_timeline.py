"""Prove at which steps a run is saved and its policy asked, and at which rates it trains."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipetransformer import cosine_with_warmup, named_schedule
from pipetransformer.config import LearningRateSchedule, TrainConfig
from pipetransformer.feed import Position, Timeline


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


SCHEDULES: dict[str, str | LearningRateSchedule] = {
    **{
        name: name
        for name in (
            "linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
            "constant_with_warmup", "inverse_sqrt",
        )
    },
    "cosine_with_min_lr": named_schedule("cosine_with_min_lr", min_lr_rate=0.1),
    "cosine_warmup_with_min_lr": named_schedule("cosine_warmup_with_min_lr", min_lr_rate=0.1),
    "warmup_stable_decay": named_schedule("warmup_stable_decay", num_decay_steps=9),
    "ours": cosine_with_warmup(0.1),
    "a function": lambda step, max_steps: 1 - step / max_steps,
}  # fmt: skip


def factors(timeline: Timeline, most: int | None = None) -> list[float]:
    """Go on to the run's end, or for so many steps; return each step's factor."""
    found: list[float] = []
    while not timeline.is_over and len(found) != most:
        found.append(timeline.learning_rate_factor(1))
        size = timeline.global_batch(1)
        timeline.advance(min(size, timeline.num_samples - timeline.position.sample))
    return found


def resumed(batch: int, other: int, max_steps: int | None, schedule: Any = "linear") -> Timeline:
    """Train half of 3 epochs of 96 samples in batches of one size; go on in those of another."""
    settings = {"epochs": 3, "max_steps": max_steps, "learning_rate_schedule": schedule}
    before = Timeline(TrainConfig(global_batch_size=batch, **settings), 96, 0.1)
    factors(before, 144 // batch)
    after = Timeline(TrainConfig(global_batch_size=other, **settings), 96, 0.1)
    after.position = before.position
    return after


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_resumed_run_has_the_rates_of_one_that_went_on(
    schedule: str | LearningRateSchedule,
) -> None:
    whole = Timeline(
        TrainConfig(epochs=3, global_batch_size=8, learning_rate_schedule=schedule), 96, 0.1
    )
    assert factors(resumed(8, 8, None, schedule)) == factors(whole)[18:]


# Steps of before were counted against the length in steps of now: from 18 of 36 on, of which 18
# are left in batches twice as large, the rate was 0.
@pytest.mark.parametrize(("batch", "other"), [(8, 16), (16, 8)])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_limit_that_does_not_end_the_run_changes_no_rate_after_another_batch(
    schedule: str | LearningRateSchedule, batch: int, other: int
) -> None:
    found = factors(resumed(batch, other, 1000, schedule))
    assert found == factors(resumed(batch, other, None, schedule))
    assert len(found) == 144 // other


@pytest.mark.parametrize(("batch", "other"), [(8, 16), (16, 8), (8, 8)])
@pytest.mark.parametrize("max_steps", [None, 36, 1000])
def test_the_rate_falls_from_where_it_was_to_the_end_of_the_epochs(
    batch: int, other: int, max_steps: int | None
) -> None:
    steps = 144 // other
    expected = [0.5 * (1 - step / steps) for step in range(steps)]
    assert factors(resumed(batch, other, max_steps)) == pytest.approx(expected, rel=1e-12)


def test_where_steps_end_the_run_the_rate_follows_steps_in_any_batches() -> None:
    # 18 steps of 8; with 24 at most there is more left of the epochs than of the steps.
    assert factors(resumed(8, 16, 24)) == pytest.approx([(24 - n) / 24 for n in range(18, 24)])
    assert factors(resumed(16, 8, 20)) == pytest.approx([(20 - n) / 20 for n in range(9, 20)])


@pytest.mark.parametrize("max_steps", [24, 26, 27, 28, 30, 36])
@pytest.mark.parametrize(("batch", "other"), [(8, 16), (16, 8), (8, 24), (24, 8), (16, 12)])
def test_whichever_limit_ends_a_resumed_run_its_rate_is_positive_and_ends_low(
    batch: int, other: int, max_steps: int
) -> None:
    timeline = resumed(batch, other, max_steps)
    assert timeline.max_steps(1) == timeline.position.step + len(factors(timeline.ahead()))
    found = factors(timeline)
    assert all(one > two > 0 for one, two in zip(found, found[1:], strict=False))
    # The last step's is what is left of the run as it is counted: a step, or a batch's samples.
    assert found[-1] < 0.1


def test_a_schedule_that_gives_no_finite_number_is_refused() -> None:
    config = TrainConfig(learning_rate_schedule=lambda step, max_steps: math.inf)
    with pytest.raises(ValueError, match="learning_rate_schedule gives inf for step 0 of 1; let"):
        Timeline(config, 32, 0.1).learning_rate_factor(1)

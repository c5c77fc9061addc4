"""Prove at which steps a run is saved."""

from __future__ import annotations

import pytest

from pipetransformer.config import TrainConfig
from pipetransformer.timeline import Timeline


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

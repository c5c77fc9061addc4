"""A run with rounded rows says once what they change of a batch's loss, and is the same run."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from pipetransformer import Trainer
from tests.helpers.measured import measuring, never
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool
from tests.helpers.scenario import Outcome, Scenario, Shape, merge, train

TOLD = re.compile(r"cache_dtype='(\w+)' changes the loss of one batch from (\S+) to (\S+) \(")


def told_by(messages: list[str]) -> list[tuple[str, float, float]]:
    found = (TOLD.match(message) for message in messages)
    return [(m[1], float(m[2]), float(m[3])) for m in found if m is not None]


def train_and_listen(scenario: Scenario) -> tuple[Outcome, list[str]]:
    """Train; return the messages of this rank, too."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipetransformer")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return train(scenario), messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_pipeline_of_two_ranks_tells_on_the_first_what_one_process_tells(
    two_ranks: Pool,
) -> None:
    outcomes, told = [], []
    for shapes in ({0: Shape(2, 2)}, {0: Shape(1, 2), 4: Shape(2, 2)}):
        settings = {"cache_dtype": "float16", "prefix_chunk": 4, "epochs": 4}
        scenario = Scenario(shapes, frozen=(0, 2, 3), settings=settings)
        ranks = two_ranks.run(train_and_listen, scenario)
        outcomes.append(merge([outcome for outcome, _ in ranks]))
        first, second = (told_by(messages) for _, messages in ranks)
        assert len(first) == 1 and second == []
        told += first
    # Losses are printed to six digits.
    assert told[0][1:] == pytest.approx(told[1][1:], rel=1e-5)
    assert outcomes[0].extra["hits"] > 0
    # Micro-batches are cut otherwise for a while.
    ours, theirs = outcomes
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    for name, tensor in ours.weights.items():
        torch.testing.assert_close(tensor, theirs.weights[name], rtol=1e-9, atol=1e-9)


def test_what_is_told_are_the_losses_of_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model, data = tiny_model(), tiny_data()
    x, y = (entry[:8] for entry in data.tensors)
    with torch.no_grad():
        hidden = model[:1](x)
        losses = [
            float(nn.functional.cross_entropy(model[1:](one), y))
            for one in (hidden, hidden.to(torch.bfloat16).double())
        ]
    seen: list[int] = []

    def count(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(target))
        return output[:, 0]

    with (
        measuring(never),
        Trainer(
            model,
            data,
            loss_fn=nn.CrossEntropyLoss(),
            freeze=lambda context: 1,
            epochs=3,
            global_batch_size=8,
            cache_dtype="bfloat16",
            metrics={"count": count},
        ) as trainer,
    ):
        trainer.fit()
    [(dtype, *told)] = told_by(caplog.messages)
    assert dtype == "bfloat16" and told == pytest.approx(losses, rel=1e-5)
    assert losses[0] != losses[1] and seen == []

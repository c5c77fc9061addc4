"""What frozen layers return is changed anew each time it is trained on, cached or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipetransformer import Trainer
from tests.helpers.feeds import IDS, Feed
from tests.helpers.measured import freely, measuring
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool


def noise(hidden: Tensor) -> Tensor:
    return hidden + 0.1 * torch.randn_like(hidden)


def train(**settings: Any) -> tuple[list[float], float, int]:
    """Return the losses, that of an evaluation, and the hits."""
    losses = []
    with (
        measuring(freely),
        Trainer(
            tiny_model(),
            tiny_data(),
            eval_dataset=tiny_data(),
            loss_fn=torch.nn.CrossEntropyLoss(),
            freeze="schedule:1,1,2",
            epochs=3,
            global_batch_size=6,
            prefix_chunk=4,
            micro_batch_size=3,
            progress=False,
            **settings,
        ) as trainer,
    ):
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        return losses, trainer.evaluate()["loss"], trainer.report.cache_hits


def test_noise_is_that_of_sample_and_epoch_whether_a_row_is_read_or_computed() -> None:
    cached, computed, plain = (
        train(augment_hidden=noise), train(augment_hidden=noise, cache=False), train()
    )  # fmt: skip
    assert cached[2] > 0
    assert cached[:2] == computed[:2]
    assert cached[0] != pytest.approx(plain[0], rel=1e-3)


def train_on_a_rank() -> list[float]:
    return train(augment_hidden=noise)[0]


@pytest.mark.slow
def test_noise_does_not_depend_on_the_number_of_ranks() -> None:
    pool = Pool(2)
    try:
        found = pool.run(train_on_a_rank)[0]
    finally:
        pool.close()
    assert found == pytest.approx(train_on_a_rank(), rel=1e-9)


def test_an_evaluation_is_not_augmented(tmp_path: Path) -> None:
    feed = Feed(tmp_path, augment_hidden=noise)
    feed.set_depth(1)
    batch, _, _ = feed.fetch(IDS)
    torch.testing.assert_close(batch["hidden"], feed.expect(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", [lambda hidden: hidden[:1], lambda hidden: hidden.float()])
def test_another_shape_or_dtype_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"augment_hidden made .* return the same shape"):
        train(augment_hidden=change)

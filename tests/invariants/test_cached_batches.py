"""Prove that cached equals uncached at any width, and where collate_fn mixes samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from tests.helpers.loops import TINY, Job, assert_as_loop, loop, sgd, train
from tests.helpers.measured import freely, measuring
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer


def narrow() -> nn.Module:
    """Build layers of a width whose rows are no multiple of 16 bytes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Sequential(nn.Linear(30, 30), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(nn.Linear(8, 30), *body, nn.Linear(30, 3))


def test_cached_equals_uncached_to_rounding_at_any_width() -> None:
    # "Bit by bit" was claimed for every width; at 30, MKL gives a row other last bits at another
    # place of a chunk (in 9 of 260 layers).
    job = Job(
        narrow,
        lambda: tiny_data(dtype=torch.float32),
        sgd,
        frozen=(0, 3, 3, 4),
        settings={**TINY.settings, "epochs": 4},
    )
    with measuring(freely):
        uncached = train(replace(job, settings={**job.settings, "cache": False}))
        cached = train(job)
    assert cached.losses == pytest.approx(uncached.losses, rel=1e-5)
    for name, tensor in cached.weights.items():
        torch.testing.assert_close(tensor, uncached.weights[name], rtol=1e-4, atol=1e-6)


def mixed(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mix each sample with the one that stands as far from the batch's other end."""
    inputs = torch.stack([x for x, _ in items])
    targets = nn.functional.one_hot(torch.stack([y for _, y in items]), 3).to(inputs.dtype)
    return 0.7 * inputs + 0.3 * inputs.flip(0), 0.7 * targets + 0.3 * targets.flip(0)


def mixed_by_two(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Take an even number of samples alone, as timm's Mixup."""
    if len(items) % 2:
        raise AssertionError("batch size should be even")
    return mixed(items)


class MixedInTheLoop(Dataset[tuple[Tensor, Tensor]]):
    """Give single samples as they are, and a plain loop's batch mixed."""

    def __init__(self) -> None:
        self.data = tiny_data(num_samples=24)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return (
            mixed([self.data[i] for i in index]) if isinstance(index, Tensor) else self.data[index]
        )


@pytest.mark.parametrize(
    ("collate_fn", "settings"),
    [(mixed, {}), (mixed_by_two, {"cache": False}), (mixed_by_two, {"num_workers": 1})],
)
def test_a_batch_is_collated_in_its_order_where_layers_are_frozen(
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    collate_fn: Callable[[list[tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]],
) -> None:
    # From the first freeze on collate_fn got a step's samples in the data set's order: mixup, in
    # data sorted by class, mixed each class with itself (losses off by 2.6e-2); and rows of mixed
    # samples were cached, until a check found that "the dataset gives another sample".
    job = Job(tiny_model, MixedInTheLoop, sgd, frozen=(0, 2, 3), settings={"epochs": 3})  # type: ignore[arg-type]
    given = {"micro_batches": 2, "pipeline_length": 1, "collate_fn": collate_fn, **settings}
    with measuring(freely):
        result = train(replace(job, settings={**job.settings, **given}))
    assert_as_loop(result, loop(job))
    warned = [text for text in caplog.messages if "collate_fn gives samples other values" in text]
    assert len(warned) == ("cache" not in settings)


def test_evaluations_are_not_mixed_where_they_have_a_collate_function_of_their_own() -> None:
    data = tiny_data(num_samples=24)
    with tiny_trainer(
        data=data, eval_dataset=data, collate_fn=mixed, eval_collate_fn=default_collate
    ) as trainer:
        loss, predicted = trainer.evaluate()["loss"], trainer.predict(data)
    inputs, targets = data.tensors
    outputs = tiny_model()(inputs)
    assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), rel=1e-9)
    assert torch.equal(torch.from_numpy(predicted.label_ids), targets)


def test_fixed_views_of_samples_that_are_mixed_are_refused() -> None:
    job = replace(TINY, settings={**TINY.settings, "cache_views": 1, "collate_fn": mixed})
    with pytest.raises(
        ValueError, match="no fixed views of samples, as collate_fn .* together than one by one"
    ):
        train(replace(job, frozen=(0, 2)))

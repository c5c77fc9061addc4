"""Prove that a corrected label is trained from the next step on, though its sample is cached.

Labels were kept in a sample's row, and compared with the data set's where the sample was checked,
by chance: of 5 corrected ones all went unnoticed in one pass of four, and were trained wrong. One
that was noticed ended the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from pipetransformer import Trainer
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.pool import Pool

NUM, EPOCHS, CORRECTED = 16, 3, (2, 3, 11)
LABELS = (tiny_data(num_samples=NUM).tensors[1] + 1) % 3


class WithAttribute:
    """Make samples of inputs, and of labels that are an attribute; count the samples made."""

    def __init__(self, name: str, labels: Any, transform: Callable[[Any], Any] = lambda y: y):
        self.inputs, self.name, self.num_made = tiny_data(num_samples=NUM).tensors[0], name, 0
        self.target_transform = transform
        setattr(self, name, labels)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.num_made += 1
        label = getattr(self, self.name)[index]
        return self.inputs[index], self.target_transform(
            label[1] if isinstance(label, tuple) else label
        )


def correct(labels: Any) -> None:
    """Correct some labels in place."""
    for index in CORRECTED:
        value = (int(LABELS[index]) + 1) % 3
        labels[index] = (labels[index][0], value) if isinstance(labels[index], tuple) else value


def tensors() -> tuple[Any, Callable[[], None]]:
    data = TensorDataset(tiny_data(num_samples=NUM).tensors[0], LABELS.clone())
    return data, lambda: correct(data.tensors[1])


def subset() -> tuple[Any, Callable[[], None]]:
    data, change = tensors()
    return Subset(data, [*range(NUM)][::-1]), change


def tuples() -> tuple[Any, Callable[[], None]]:
    data = list(zip(tiny_data(num_samples=NUM).tensors[0], LABELS.tolist(), strict=True))
    return data, lambda: correct(data)


def mappings() -> tuple[Any, Callable[[], None]]:
    data = [{"x": x, "y": y, "more": "?"} for x, y in tuples()[0]]

    def change() -> None:
        labels = [item["y"] for item in data]
        correct(labels)
        for item, label in zip(data, labels, strict=True):
            item["y"] = label

    return data, change


def attribute(name: str, labels: Any, **options: Any) -> tuple[Any, Callable[[], None]]:
    data = WithAttribute(name, labels, **options)

    def change() -> None:
        correct(getattr(data, name))
        data.num_made = 0

    return data, change


SETS: dict[str, Callable[[], tuple[Any, Callable[[], None]]]] = {
    "a TensorDataset": tensors,
    "a Subset": subset,
    "a list of tuples": tuples,
    "a list of mappings": mappings,
    "targets in a list": lambda: attribute("targets", LABELS.tolist()),
    "targets in a tensor": lambda: attribute("targets", LABELS.clone()),
    "labels in an array": lambda: attribute("labels", LABELS.numpy().copy()),
    "samples of paths": lambda: attribute("samples", [("path", y) for y in LABELS.tolist()]),
}


def run(made: tuple[Any, Callable[[], None]], **settings: Any) -> list[float]:
    """Train with labels that are corrected after the first epoch; return losses and accuracies."""
    (data, change), found = made, []
    with Trainer(
        tiny_model(),
        data,
        eval_dataset=data,
        loss_fn=nn.CrossEntropyLoss(),
        freeze=lambda context: (2, 2, 3)[context.epoch],
        epochs=EPOCHS,
        global_batch_size=8,
        evaluate_every_epochs=0,
        **settings,
    ) as trainer:
        while not trainer.is_over:
            found.append(trainer.step().loss)
            if trainer.epoch.is_integer():
                if trainer.epoch == 1:
                    trainer.evaluate()  # Its rows are made of the labels of before, too.
                    change()
                found += trainer.evaluate().values()
    return found


@pytest.mark.parametrize("kind", SETS)
def test_corrected_labels_are_trained_and_the_cache_goes_on(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, change = SETS[kind]()
    cached = run((data, change))
    assert cached == pytest.approx(run(SETS[kind](), cache=False), rel=1e-12)
    assert "gives another sample" not in caplog.text
    if isinstance(data, WithAttribute):
        # Of 5 passes over all, two of them of training: the corrected ones and some to check.
        assert 2 * len(CORRECTED) <= data.num_made < 2 * NUM


def test_labels_that_another_process_corrected_are_trained(two_ranks: Pool) -> None:
    found = two_ranks.run(run, tensors_by_rank(), timeout_s=60.0)
    assert found[0] == pytest.approx(run(tensors(), cache=False), rel=1e-9)


class tensors_by_rank:  # noqa: N801
    """Be what `tensors` gives, in another process."""

    def __iter__(self) -> Any:
        return iter(tensors())


@pytest.mark.parametrize(
    "transform", [lambda y: 2 - y, lambda y: torch.tensor([y, y])[0], lambda y: np.int64(y)]
)
def test_labels_that_are_transformed_are_the_data_set_s(transform: Callable[[Any], Any]) -> None:
    def made() -> tuple[Any, Callable[[], None]]:
        return attribute("targets", LABELS.tolist(), transform=transform)

    settings = {"cache_check": "all"}
    assert run(made(), **settings) == pytest.approx(run(made(), cache=False), rel=1e-12)


def test_a_column_that_the_data_set_does_not_read_is_left_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A data set of a folder has `targets`, but takes labels from `samples`."""

    def made() -> tuple[Any, Callable[[], None]]:
        data = WithAttribute("samples", [("path", y) for y in LABELS.tolist()])
        data.targets = LABELS.tolist()
        return data, lambda: correct(data.targets)

    caplog.set_level(logging.INFO)
    assert run(made()) == pytest.approx(run(made(), cache=False), rel=1e-12)
    assert (
        caplog.text.count("gives other targets than its targets hold") == 2
    )  # And once evaluated.

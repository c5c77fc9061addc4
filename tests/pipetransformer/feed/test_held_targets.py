"""Claims about targets that are known without the samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from pipetransformer.feed import Collation, HeldTargets, Samples

IDS = torch.tensor([2, 0, 3])
LABELS = [4, 5, 6, 7]
INPUTS = torch.zeros(4, 2)


class Sized(SimpleNamespace):
    """Have some attributes, and as many samples as labels."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("made a sample")


class Made(list[Any]):
    """Make samples as they are read, which takes long."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("made a sample")


def held(dataset: Any, names: tuple[str, ...] = ("labels",)) -> HeldTargets:
    collation = Collation(("x", *names), inputs=("x",), targets=names)
    return HeldTargets(Samples(dataset, collation, 0))


def changed(targets: HeldTargets, *kept: Any, names: tuple[str, ...] = ("labels",)) -> list[bool]:
    rows = {name: torch.as_tensor(one) for name, one in zip(names, kept, strict=True)}
    return targets.changed(IDS, rows).tolist()


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(INPUTS, torch.tensor(LABELS)),
        [*zip(INPUTS, LABELS, strict=True)],
        [{"x": x, "label": y} for x, y in zip(INPUTS, LABELS, strict=True)],
        Sized(targets=LABELS),
        Sized(labels=np.array(LABELS)),
        Sized(targets=torch.tensor(LABELS)),
        Sized(samples=[(f"{y}.png", y) for y in LABELS]),
        Subset(Subset(Sized(targets=LABELS), [3, 2, 1, 0]), torch.tensor([3, 2, 1, 0])),
    ],
)
def test_a_target_that_is_not_the_kept_one_is_known_without_a_sample(dataset: Any) -> None:
    assert changed(held(dataset), [6, 4, 7]) == [False, False, False]
    assert changed(held(dataset), [6, 5, 7]) == [False, True, False]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(INPUTS),
        Made([(x, y) for x, y in zip(INPUTS, LABELS, strict=True)]),
        Sized(targets=None, labels="names", samples=7),
        Sized(targets=LABELS[:2]),
        Sized(targets=["a", "b", "c", "d"]),
        Sized(targets=np.array(["a", "b", "c", "d"])),
        Sized(targets=[[1], [1, 2], [], [3]]),
        Sized(samples=["a.png", "b.png", "c.png", "d.png"]),
        Sized(targets=torch.tensor(3), labels=np.array(3)),
        object(),
    ],
)
def test_where_no_targets_are_held_nothing_is_known(dataset: Any) -> None:
    assert changed(held(dataset), [1, 2, 3]) == [False, False, False]


def test_a_model_without_targets_asks_for_none() -> None:
    for dataset in ([(x,) for x in INPUTS], TensorDataset(INPUTS), Sized(targets=LABELS)):
        assert changed(held(dataset, ()), names=()) == [False, False, False]


def test_a_place_is_left_aside_once_the_data_set_gives_others() -> None:
    dataset = Sized(targets=LABELS, labels=LABELS)
    targets = held(dataset)
    targets.compare(IDS, {"labels": torch.tensor([6, 4, 7])})
    assert changed(targets, [6, 4, 8]) == [False, False, True]
    dataset.labels = [0, 0, 0, 0]
    targets.compare(IDS, {"labels": torch.tensor([6, 4, 7])})
    assert changed(targets, [6, 4, 8]) == [False, False, True]  # By the other one.
    targets.compare(IDS, {"labels": torch.tensor([2, 4, 7])})
    assert changed(targets, [6, 4, 8]) == [False, False, False]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.1, 0.2, 0.3, 0.4], torch.tensor([0.3, 0.1, 0.4])),
        ([1, 0, 1, 0], torch.tensor([1.0, 1.0, 0.0])),
        ([[True, False]] * 4, torch.tensor([[True, False]] * 3)),
        ([float("nan")] * 4, torch.tensor([float("nan")] * 3)),
        (torch.eye(4), torch.eye(4)[IDS]),
    ],
)
def test_targets_are_compared_as_they_are_kept(values: Any, kept: Tensor) -> None:
    targets = held(Sized(targets=values))
    assert changed(targets, kept) == [False, False, False]
    other = kept.clone()
    other[1] = 0 if kept[1].isnan().any() else kept[1].logical_not()
    assert changed(targets, other) == [False, True, False]


def test_each_of_several_targets_counts() -> None:
    names = ("start", "end")
    dataset = TensorDataset(INPUTS, torch.tensor(LABELS), torch.tensor(LABELS) + 1)
    targets = held(dataset, names)
    assert changed(targets, [6, 4, 7], [7, 5, 8], names=names) == [False, False, False]
    assert changed(targets, [6, 4, 7], [7, 5, 9], names=names) == [False, False, True]
    assert changed(targets, [9, 4, 7], [7, 5, 8], names=names) == [True, False, False]

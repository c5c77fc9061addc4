"""Claims about targets that are known without the samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from pipetransformer.feed import Collation, Samples, TargetSource

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


def table(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": INPUTS.tolist(), **columns})


def reordered() -> datasets.Dataset:
    """Return a table that a shuffle and a filter have mapped, (4,) LABELS in their order."""
    shuffled = datasets.Dataset.from_dict({"label": [0, *LABELS, 1]}).shuffle(seed=3)
    kept = shuffled.filter(lambda label: label in LABELS, input_columns="label")
    found = list(kept["label"])
    assert found != LABELS
    return kept.select([found.index(label) for label in LABELS])


def held(dataset: Any, names: tuple[str, ...] = ("labels",)) -> TargetSource:
    collation = Collation(("x", *names), inputs=("x",), targets=names, needs_targets=False)
    return TargetSource(Samples(dataset, collation, 0))


def changed(targets: TargetSource, *kept: Any, names: tuple[str, ...] = ("labels",)) -> list[bool]:
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
        table(label=LABELS),
        table(labels=LABELS).with_format("torch", columns=["x"]),
        table(label_ids=LABELS[::-1]).select([3, 2, 1, 0]),
        reordered(),
        Subset(table(label=LABELS[::-1]), [3, 2, 1, 0]),
    ],
)
def test_a_target_that_is_not_the_kept_one_is_known_without_a_sample(dataset: Any) -> None:
    assert changed(held(dataset), [6, 4, 7]) == [False, False, False]
    assert changed(held(dataset), [6, 5, 7]) == [False, True, False]


def test_without_targets_what_rows_hold_beside_is_looked_at() -> None:
    # As of a decoder whose inputs are made of labels: each sample was read, at every step.
    dataset = [{"x": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    collation = Collation(("x", "labels"), inputs=("x", "labels"), targets=(), needs_targets=False)
    source = TargetSource(Samples(dataset, collation, 0), ("labels",))
    assert source.knows() and not TargetSource(Samples(dataset, collation, 0)).knows()
    assert changed(source, [6, 5, 7]) == [False, True, False]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(INPUTS),
        Made([(x, y) for x, y in zip(INPUTS, LABELS, strict=True)]),
        Sized(targets=None, labels="names", samples=7),
        Sized(targets=LABELS[:2]),
        Sized(targets=["a", "b", "c", "d"]),
        Sized(targets=np.array(["a", "b", "c", "d"])),
        Sized(targets=[[1], [1], ["a", "b"], [3]]),
        Sized(targets=[[1], [1], [[1], [2]], [3]]),
        Sized(samples=["a.png", "b.png", "c.png", "d.png"]),
        Sized(targets=torch.tensor(3), labels=np.array(3)),
        object(),
        table(),
        table(label=["a", "b", "c", "d"]),
        table(label=[1, None, None, 3]),
        table(label=[{"a": 1}] * 4),
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


def test_columns_of_several_targets_count_if_there_is_one_for_each() -> None:
    names = ("start", "end")
    targets = held(table(start=LABELS, end=LABELS), names)
    assert changed(targets, [6, 4, 7], [6, 4, 7], names=names) == [False, False, False]
    assert changed(targets, [6, 4, 7], [6, 5, 7], names=names) == [False, True, False]
    targets = held(table(start=LABELS), names)
    assert changed(targets, [6, 5, 7], [6, 4, 7], names=names) == [False, False, False]


@pytest.mark.parametrize("make", [lambda v: Sized(targets=v), lambda v: table(labels=v)])
def test_labels_of_unequal_lengths_are_compared_as_collators_pad_them(make: Any) -> None:
    targets = held(make([[1], [9, 9, 9, 9], [1, 2], [3, 4, 5]]))
    kept = torch.tensor([[1, 2, -100, -100], [1, -100, -100, -100], [3, 4, 5, -100]])
    assert changed(targets, kept) == [False, False, False]
    for place in ((0, 1), (1, 1), (2, 3)):
        other = kept.clone()
        other[place] = 7
        assert changed(targets, other) == [row == place[0] for row in range(3)]
    targets.compare(IDS, {"labels": kept[:, :3]})
    assert changed(targets, kept + 1) == [True, True, True]
    targets.compare(IDS, {"labels": kept.clamp(min=0)})  # Another collator pads with zeros.
    assert changed(targets, kept + 1) == [False, False, False]


def test_several_labels_of_a_sample_are_known_from_their_column() -> None:
    several = [[0.1, 1.0], [0.2, 0.0], [0.3, 1.0], [0.4, 0.0]]
    kept = torch.tensor(several)[IDS]
    targets = held(table(labels=several))
    assert changed(targets, kept) == [False, False, False]
    kept[1, 0] = 0.5
    assert changed(targets, kept) == [False, True, False]


def test_a_corrected_column_is_seen_where_another_table_takes_the_place() -> None:
    subset = Subset(table(label=LABELS), [0, 1, 2, 3])
    targets = held(subset)
    assert changed(targets, [6, 4, 7]) == [False, False, False]
    subset.dataset = table(label=[4, 5, 6, 0])
    assert changed(targets, [6, 4, 7]) == [False, False, True]


def labelled(batch: dict[str, Any], add: int) -> dict[str, Any]:
    return {"x": batch["x"], "labels": [label + add for label in batch["label"]]}


def test_a_column_is_known_if_a_transform_leaves_labels_alone() -> None:
    assert held(table(label=LABELS).with_transform(lambda b: labelled(b, 0))).knows()
    targets = held(table(label=LABELS).with_transform(lambda b: labelled(b, 1)))
    assert not targets.knows()
    assert changed(targets, [6, 4, 8]) == [False, False, False]
    assert not held(table()).knows()

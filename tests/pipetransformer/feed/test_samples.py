"""Prove that a sample depends on (seed, epoch, index) alone, and that odd samples are refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipetransformer.feed import Batch, Collation, Samples, check_dataset


class Made(Dataset[Any]):
    """Items made by a function of the index, and a note of which were asked for."""

    def __init__(self, make: Callable[[int], Any], num_samples: int = 32) -> None:
        self.make = make
        self.num_samples = num_samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


def augmented(index: int) -> dict[str, Any]:
    """Draw from all three global generators, as augmentations do."""
    return {"x": torch.rand(3) + index, "mask": np.random.rand(2), "y": random.random()}


def read(
    dataset: Made,
    ids: Sequence[int],
    *,
    names: Sequence[str] = ("x", "mask", "y"),
    required: Sequence[str] = ("x", "y"),
    seed: int = 0,
    epoch: int = 0,
) -> Batch:
    """Read samples by plain indices."""
    return samples_of(dataset, names=names, required=required, seed=seed).read(ids, view=epoch)


def samples_of(
    dataset: Any,
    *,
    names: Sequence[str] = ("x", "y"),
    required: Sequence[str] = ("x", "y"),
    seed: int = 0,
    **options: Any,
) -> Samples:
    """Describe samples whose first required entry is the model's input."""
    inputs, targets = tuple(required[:1]), tuple(required[1:])
    collation = Collation(tuple(names), inputs, targets, **options)
    return Samples(dataset, collation, seed)


def test_a_sample_does_not_depend_on_what_was_read_with_or_before_it() -> None:
    dataset = Made(augmented)
    together = read(dataset, [3, 1, 7], seed=5, epoch=2)
    for position, index in enumerate([3, 1, 7]):
        torch.rand(index), np.random.rand(index), random.random()
        alone = read(dataset, [index], seed=5, epoch=2)
        for name, entry in alone.items():
            assert torch.equal(entry[0], together[name][position]), (name, index)


@pytest.mark.parametrize("changes", [{"seed": 6}, {"epoch": 3}, {"ids": [4]}], ids=str)
@pytest.mark.parametrize("name", ["x", "mask", "y"])
def test_seed_epoch_and_index_each_change_every_generator(
    name: str, changes: dict[str, Any]
) -> None:
    dataset = Made(lambda index: {**augmented(0), "index": index})
    usual: dict[str, Any] = {"ids": [3], "seed": 5, "epoch": 2}
    one, other = (read(dataset, **given)[name] for given in (usual, {**usual, **changes}))
    assert not torch.equal(one, other)


def test_exactly_the_samples_asked_for_are_read_in_order() -> None:
    dataset = Made(augmented)
    read(dataset, [9, 0, 9, 31])
    assert dataset.read == [9, 0, 9, 31]


def test_tuples_take_the_required_names_in_order() -> None:
    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    batch = samples_of(data, names=("x", "mask", "y")).read([2, 0], view=0)
    assert torch.equal(batch["x"], torch.tensor([[4.0, 5.0], [0.0, 1.0]]))
    assert torch.equal(batch["y"], torch.tensor([2, 0])) and list(batch) == ["x", "y"]


def test_arrays_numbers_and_lists_of_numbers_become_tensors_of_their_dtype() -> None:
    dataset = Made(
        lambda index: {
            "x": [index, 7, 8],
            "mask": np.ones((2, 2), np.float32),
            "y": index % 2 == 0,
            "text": "left out",
        }
    )
    batch = read(dataset, [1, 2])
    assert torch.equal(batch["x"], torch.tensor([[1, 7, 8], [2, 7, 8]]))
    assert torch.equal(batch["mask"], torch.ones(2, 2, 2))
    assert torch.equal(batch["y"], torch.tensor([False, True]))
    assert batch.keys() == {"x", "mask", "y"}


def test_optional_entries_that_no_sample_gives_are_left_out() -> None:
    dataset = Made(lambda index: {"x": torch.zeros(2), "mask": None, "y": 0})
    assert read(dataset, [0, 1]).keys() == {"x", "y"}


def sometimes(index: int) -> dict[str, Any]:
    """Give a mask with every second sample."""
    return {"x": torch.zeros(2), "y": 0, **({"mask": torch.ones(2)} if index % 2 else {})}


@pytest.mark.parametrize("ids", [[2, 3, 4], [3, 2, 4]], ids=["first lacks it", "later lack it"])
def test_an_entry_that_only_some_samples_give_is_refused_and_never_dropped(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"samples \[2, 4\] lack the entry 'mask'"):
        read(Made(sometimes), ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: {"x": torch.zeros(i), "y": 0}, r"'x' of the samples \[1, 2\].* padded to one"),
        (lambda i: {"x": np.zeros(i), "y": 0}, r"'x' of the samples \[1, 2\].* padded to one"),
        (lambda i: {"x": [0] * i, "y": 0}, r"'x' of the samples \[1, 2\].* padded to one"),
        (lambda i: {"x": [[0], [0, 1]], "y": 0}, r"entry 'x' .* cannot be stacked"),
        (lambda i: {"x": torch.zeros(2), "y": object()}, r"entry 'y' .* cannot be stacked"),
        (lambda i: {"x": "a text", "y": 0}, r"entry 'x' .* is a str; give tensors"),
        (lambda i: {"x": ["a", "b"], "y": 0}, r"entry 'x' .* cannot be stacked"),
        (lambda i: {"x": {"a": 1}, "y": 0}, r"entry 'x' .* is a dict; give tensors"),
        (
            lambda i: {"x": torch.zeros(2), "z": 0},
            r"lacks \['y'\]; the model needs \['x', 'y'\] and it has \['x', 'z'\]",
        ),
        (
            lambda i: {"x": torch.zeros(2), "y": None},
            r"lacks \['y'\]; the model needs \['x', 'y'\]",
        ),
        (
            lambda i: {"xs": torch.zeros(2), "y": 0},
            r"lacks \['x'\].*; did you mean 'xs'[?] rename it to 'x'$",
        ),
        (lambda i: {"images": torch.zeros(2), "y": 0}, r"lacks \['x'\]; the model needs"),
        (lambda i: (torch.zeros(2),), r"is a tuple of 1; give a mapping .* or a tuple of 2"),
        (lambda i: (torch.zeros(2), 0, 0), r"is a tuple of 3; give a mapping .* or a tuple of 2"),
        (lambda i: torch.zeros(2), r"is a Tensor; give a mapping"),
        (lambda i: None, r"is a NoneType; give a mapping"),
    ],
)
def test_a_sample_that_cannot_be_used_is_refused_with_what_to_give(
    make: Callable[[int], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(Made(make), [1, 2])


class Stream(IterableDataset[Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(4))


class SizedStream(Stream):
    """One with a length, whose samples cannot be had by index either."""

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (
            Stream(),
            TypeError,
            r"train_dataset \(Stream\) has no length; .* for instance list\(dataset\)",
        ),
        (iter([1]), TypeError, r"train_dataset \(list_iterator\) has no length"),
        (
            DataLoader(Made(augmented)),
            TypeError,
            r"\(DataLoader\) gives no samples by index; .*map-style",
        ),
        (SizedStream(), TypeError, r"train_dataset \(SizedStream\) gives no samples by index"),
        ({1, 2}, TypeError, r"train_dataset \(set\) gives no samples by index"),
        ([], ValueError, "train_dataset is empty; give at least one sample"),
    ],
)
def test_what_cannot_be_read_by_index_is_refused(
    dataset: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_dataset(dataset, "train_dataset")


def test_lists_and_datasets_with_a_length_are_accepted() -> None:
    for dataset in ([(1, 2)], Made(augmented), TensorDataset(torch.zeros(3))):
        check_dataset(dataset, "train_dataset")


def varies(make: Callable[[int], Mapping[str, Any]], num_samples: int = 32) -> bool:
    return samples_of(Made(make, num_samples)).vary_between_reads()


UNSEEDED = np.random.default_rng()


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"x": torch.rand(2), "y": 0},
        lambda i: {"x": torch.zeros(2), "y": np.random.rand()},
        lambda i: {
            "x": torch.arange(2.0).flip(0) if random.random() < 0.5 else torch.arange(2.0),
            "y": 0,
        },
        lambda i: {"x": UNSEEDED.random(2), "y": 0},
    ],
    ids=["torch", "numpy", "random flip of every second", "generator of its own"],
)
def test_random_samples_are_told(make: Callable[[int], Mapping[str, Any]]) -> None:
    assert varies(make)


@pytest.mark.parametrize("num_samples", [1, 3, 100])
def test_fixed_samples_are_told(num_samples: int) -> None:
    assert not varies(lambda i: {"x": torch.full((2,), i), "y": i}, num_samples)


def test_a_tensor_dataset_is_read_as_its_items_are() -> None:
    x, y = torch.arange(40.0).reshape(10, 4), torch.arange(10)
    ids = [7, 0, 7, 3]
    whole = samples_of(TensorDataset(x, y)).read(ids, view=0)
    items = samples_of(list(TensorDataset(x, y))).read(ids, view=0)
    assert list(whole) == list(items) == ["x", "y"]
    for name, tensor in items.items():
        assert torch.equal(whole[name], tensor) and whole[name].dtype == tensor.dtype
    with pytest.raises(ValueError, match="a tuple of 2 in that order"):
        samples_of(TensorDataset(x)).read(ids, view=0)


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
def test_labels_go_by_any_of_their_names(name: str) -> None:
    items = [{"x": torch.zeros(2), name: 3, "text": "left out"}] * 2
    for wanted in ("labels", "label"):
        names = ("x", wanted)
        batch = samples_of(items, names=names, required=names).read([0, 1], view=0)
        assert list(batch) == ["x", wanted] and batch[wanted].tolist() == [3, 3]
    both = [{"x": torch.zeros(2), "label": 1, "labels": 2}]
    batch = samples_of(both, names=("labels",), required=("labels",)).read([0], view=0)
    assert batch["labels"].tolist() == [2]


def seldom(index: int) -> dict[str, Any]:
    """Draw for one sample alone."""
    drawn = {4: torch.rand, 5: lambda _: np.random.rand(1), 6: lambda _: [random.random()]}
    make = drawn.get(index % 100)
    return {"x": torch.zeros(1) if make is None else torch.as_tensor(make(1)), "y": index}


@pytest.mark.parametrize("index", [304, 305, 306])
def test_a_sample_that_draws_behind_many_that_do_not_has_its_own_seed(index: int) -> None:
    data = Made(seldom, num_samples=400)
    late = samples_of(data)
    for start in range(10, 90, 20):
        late.read(range(start, start + 20), view=3)
    data.read.clear()
    batch = late.read([250, index, 251], view=3)
    assert data.read == [250, index, 251] * 2
    alone = samples_of(data).read([index], view=3)
    assert torch.equal(batch["x"][1:2], alone["x"]) and float(batch["x"][1]) > 0
    data.read.clear()
    late.read([252], view=3)
    assert data.read == [252]


def test_a_collate_fn_that_draws_late_is_seeded_by_its_batch() -> None:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        noise = torch.rand(len(items)) if items[0]["y"] > 300 else torch.zeros(len(items))
        return {"x": noise, "y": torch.tensor([item["y"] for item in items])}

    data = Made(lambda index: {"x": torch.zeros(1), "y": index}, num_samples=400)
    late = samples_of(data, function=collate)
    for start in range(0, 80, 20):
        late.read(range(start, start + 20), view=1)
    ids = [310, 311]
    expected = samples_of(data, function=collate).read(ids, view=1)
    assert torch.equal(late.read(ids, view=1)["x"], expected["x"])

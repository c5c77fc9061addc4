"""Know samples' targets without reading the samples, where the data set holds them apart.

A corrected label must be trained, though its sample is cached and is not read again. Where a data
set holds labels is a guess; each sample that is read checks it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset, TensorDataset

from pipetransformer.feed.collation import Batch, entry_of, names_for, stack
from pipetransformer.feed.samples import Samples

_LOGGER = logging.getLogger(__name__)

_ATTRIBUTES = ("targets", "labels", "samples")
"""Where torchvision's data sets hold targets; "samples" has (path, target) of each sample."""

_MOST_COMPARED = 16

_PADDING = -100
"""What collators put behind a sample's own labels: torch's losses leave it out."""


@final
class TargetSource:
    """Read targets from where a data set holds them, as long as its samples have the same ones.

    Known places are the tensors of a TensorDataset, the items of a list, the attributes of
    torchvision's data sets, columns of a `datasets.Dataset`, and a Subset of any of these.

    Args:
        sides: what rows hold beside targets; looked at where there are none, as where a model
            makes its decoder's inputs of the labels it is given.
    """

    def __init__(self, samples: Samples, sides: tuple[str, ...] = ()) -> None:
        self._samples, self._names = samples, samples.collation.targets or sides
        self._refuted: set[str] = set()
        # A table of some columns takes a millisecond to make.
        self._table: tuple[Any, list[Any]] = None, []

    def knows(self) -> bool:
        """Return whether there is such a place; some samples are read to compare."""
        ids = torch.tensor(self._samples.spread(_MOST_COMPARED))
        for index in ids.split(1):  # Together they may have unequal shapes.
            self.compare(index, self._samples.probe(index.tolist()))
        return bool(self._held(ids))

    def changed(self, ids: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return (B,) bool: whose targets differ from those kept, (B, ...) each by name."""
        changed = torch.zeros(len(ids), dtype=torch.bool)
        for held in self._held(ids).values():
            changed |= _differing(held, kept)
        return changed

    def compare(self, ids: Tensor, given: Batch) -> None:
        """Use a place no more that holds other targets than the samples just read."""
        for place, held in self._held(ids).items():
            if _differing(held, given).any():
                self._refute(place)

    def _held(self, ids: Tensor) -> dict[str, Batch]:
        """Return the samples' targets, by the places that hold them."""
        held: dict[str, Batch] = {}
        for place, values in self._places(ids.tolist()):
            try:
                if place not in self._refuted:
                    named = zip(self._names, values, strict=True)
                    held[place] = {name: _stacked(each, name, ids) for name, each in named}
            except (TypeError, ValueError):  # Targets are no numbers, or of unequal shapes.
                self._refute(place)
        return held

    def _places(self, ids: list[int]) -> Iterator[tuple[str, list[Any]]]:
        """Yield each place, and the samples' values of each target there."""
        dataset: Any = self._samples.dataset
        names = self._names
        while type(dataset) is Subset:
            dataset, ids = dataset.dataset, [int(dataset.indices[index]) for index in ids]
        if isinstance(dataset, TensorDataset):
            if 0 < len(names) < len(dataset.tensors):
                index = torch.tensor(ids)
                yield "tensors", [tensor[index] for tensor in dataset.tensors[-len(names) :]]
        elif type(dataset) in (list, tuple):  # A subclass may make items when they are read.
            if names:
                yield "items", _targets([dataset[index] for index in ids], names)
        elif columns := self._columns_of(dataset):
            yield "columns", [column[ids][column.column_names[0]] for column in columns]
        elif len(names) == 1:
            for place, column in _columns(dataset):
                if isinstance(column, (Tensor, np.ndarray)):
                    yield place, [column[ids]]
                else:
                    values = [column[index] for index in ids]
                    yield place, _targets(values, names) if place == "samples" else [values]

    def _columns_of(self, dataset: Any) -> list[Any]:
        """Return a table of each target's column alone; [] where one has none."""
        if not _is_table(dataset):
            return []
        if self._table[0] is not dataset:
            named = [
                [n for n in names_for(name) if n in dataset.column_names] for name in self._names
            ]
            found = [dataset.select_columns(n[:1]).with_format(None) for n in named if n]
            self._table = dataset, found if len(found) == len(named) else []
        return self._table[1]

    def _refute(self, place: str) -> None:
        self._refuted.add(place)
        _LOGGER.info(
            "the data set gives other targets than its %s hold: a label that is changed there is "
            "noticed where its sample is checked",
            place,
        )


def _is_table(dataset: Any) -> bool:
    """Return whether this is a `datasets.Dataset`; to import that package takes seconds."""
    known = ("datasets.arrow_dataset", "Dataset")
    return any((each.__module__, each.__name__) == known for each in type(dataset).__mro__)


def _columns(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that may hold targets, with their names."""
    # A property of the class may compute, and take long.
    own = getattr(dataset, "__dict__", {})
    for place in _ATTRIBUTES:
        value = own.get(place)
        if not isinstance(value, (list, tuple, np.ndarray, Tensor)):
            continue
        if getattr(value, "ndim", 1) and len(value) == len(dataset):
            yield place, value


def _targets(items: list[Any], names: tuple[str, ...]) -> list[list[Any]]:
    """Return each target's values, one a sample."""
    if all(type(item) is dict for item in items):  # As most are: a plain look-up is faster.
        found = [[item.get(name) for item in items] for name in names]
        if not any(value is None for values in found for value in values):
            return found
    return [[_target(item, name, names) for item in items] for name in names]


def _target(item: Any, name: str, names: tuple[str, ...]) -> Any:
    """Return a sample's target; None if unknown."""
    if isinstance(item, Mapping):
        return entry_of(item, name)
    if isinstance(item, (tuple, list)) and len(item) > len(names):
        return item[names.index(name) - len(names)]
    return None


def _stacked(values: Any, name: str, ids: Tensor) -> Tensor:
    if not isinstance(values, list):
        return torch.as_tensor(values).cpu()
    if all(isinstance(value, (list, tuple)) for value in values):
        rows = [torch.as_tensor(value) for value in values]
        if all(row.ndim == 1 for row in rows):
            return pad_sequence(rows, batch_first=True, padding_value=_PADDING)
    return stack(values, name, ids.tolist())


def _differing(held: Batch, others: Mapping[str, Tensor]) -> Tensor:
    """Return (B,) bool: whose targets differ, of the names that both have."""
    differing = torch.zeros(len(next(iter(held.values()))), dtype=torch.bool)
    for name in held.keys() & others.keys():
        mine, other = held[name], others[name]
        if mine.ndim == other.ndim == 2 and mine.shape[1] < other.shape[1]:
            mine = pad(mine, (0, other.shape[1] - mine.shape[1]), value=_PADDING)
        if mine.shape != other.shape:
            return torch.ones_like(differing)
        if other.is_floating_point():
            mine = mine.to(other.dtype)
        if torch.equal(mine, other):
            continue
        # NaN, which may stand for a missing label, equals NaN here.
        unlike = (mine != other) & ~(mine.isnan() & other.isnan())
        differing |= unlike.reshape(len(mine), -1).any(dim=1)
    return differing

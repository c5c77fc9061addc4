"""Know samples' targets without making the samples, where the data set holds them apart.

A label that is corrected must be trained, though its sample is cached and so not asked for. Where
a data set holds labels is a guess; each sample that is read checks it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from pipetransformer.feed.collation import Batch, entry_of, stack
from pipetransformer.feed.samples import Samples

_LOGGER = logging.getLogger(__name__)

_ATTRIBUTES = ("targets", "labels", "samples")
"""Where torchvision's data sets hold targets, one a sample; in the last one behind a file's path,
and those that read folders take them from there."""


@final
class HeldTargets:
    """Read targets from where a data set holds them, as long as it gives the same ones.

    Known are the tensors of a TensorDataset, the items of a list, sequences that torchvision's
    data sets have as attributes, and a Subset of any of these; elsewhere nothing.
    """

    def __init__(self, samples: Samples) -> None:
        self._dataset, self._names = samples.dataset, samples.collation.targets
        self._refuted: set[str] = set()

    def changed(self, ids: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return (B,) bool: of which samples another target is held than the one kept.

        Args:
            ids: (B,) int64.
            kept: (B, ...) each, by name.
        """
        changed = torch.zeros(len(ids), dtype=torch.bool)
        for held in self._held(ids).values():
            changed |= _differing(held, kept)
        return changed

    def compare(self, ids: Tensor, given: Batch) -> None:
        """Leave places aside from now on that hold others than the data set gave just now."""
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
            except (TypeError, ValueError):  # They are no numbers, or of unequal shapes.
                self._refute(place)
        return held

    def _places(self, ids: list[int]) -> Iterator[tuple[str, list[Any]]]:
        """Yield each place, and the samples' values of each target there."""
        dataset: Any = self._dataset
        names = self._names
        while type(dataset) is Subset:
            dataset, ids = dataset.dataset, [int(dataset.indices[index]) for index in ids]
        if isinstance(dataset, TensorDataset):
            if 0 < len(names) < len(dataset.tensors):
                yield "tensors", [tensor[ids] for tensor in dataset.tensors[-len(names) :]]
        elif type(dataset) in (list, tuple):  # Other lists may make items when they are read.
            if names:
                yield "items", _targets([dataset[index] for index in ids], names)
        elif len(names) == 1:
            for place, column in _columns(dataset):
                if isinstance(column, (Tensor, np.ndarray)):
                    yield place, [column[ids]]
                else:
                    values = [column[index] for index in ids]
                    yield place, _targets(values, names) if place == "samples" else [values]

    def _refute(self, place: str) -> None:
        self._refuted.add(place)
        _LOGGER.info(
            "the data set gives other targets than its %s hold: a label that is changed there is "
            "noticed where its sample is checked",
            place,
        )


def _columns(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield those attributes that may hold targets, by name."""
    # What is not an attribute of the data set itself may be computed, and take long.
    own = getattr(dataset, "__dict__", {})
    for place in _ATTRIBUTES:
        value = own.get(place)
        if not isinstance(value, (list, tuple, np.ndarray, Tensor)):
            continue
        if getattr(value, "ndim", 1) and len(value) == len(dataset):
            yield place, value


def _targets(items: list[Any], names: tuple[str, ...]) -> list[list[Any]]:
    """Return of each target the samples' values."""
    return [[_target(item, name, names) for item in items] for name in names]


def _target(item: Any, name: str, names: tuple[str, ...]) -> Any:
    """Return a sample's target; None where it is not known which that is."""
    if isinstance(item, Mapping):
        return entry_of(item, name)
    if isinstance(item, (tuple, list)) and len(item) > len(names):
        return item[names.index(name) - len(names)]
    return None


def _stacked(values: Any, name: str, ids: Tensor) -> Tensor:
    if isinstance(values, list):
        return stack(values, name, ids.tolist())
    return torch.as_tensor(values).cpu()


def _differing(held: Batch, others: Mapping[str, Tensor]) -> Tensor:
    """Return (B,) bool: which samples' targets differ from others, where there are those."""
    differing = torch.zeros(len(next(iter(held.values()))), dtype=torch.bool)
    for name in held.keys() & others.keys():
        mine, other = held[name], others[name]
        if mine.shape != other.shape:
            return torch.ones_like(differing)
        if other.is_floating_point():
            mine = mine.to(other.dtype)
        # A NaN, which stands for a label that is missing, is no change where it stays.
        unlike = (mine != other) & ~(mine.isnan() & other.isnan())
        differing |= unlike.reshape(len(mine), -1).any(dim=1)
    return differing

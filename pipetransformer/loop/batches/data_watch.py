"""Notice that samples in memory were edited in place, between two epochs.

what holds samples                         what tells
tensors, of a TensorDataset or items       their versions
tensors in the data set's attributes       their versions, also in a list or tuple of a few
numpy arrays there                         a fingerprint of their values

Samples that are read from files are not looked at here, nor are labels, which are compared where
they are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from autocache import fingerprint

_TARGETS = ("targets", "labels", "samples")
_MOST_ITEMS, _MOST_COLUMNS = 100_000, 16
_VERSION = attrgetter("_version")


@final
class DataWatch:
    """Watch a data set.

    Args:
        inputs: names of the entries that the model is given; positions, of tuples.
    """

    def __init__(self, dataset: Any, inputs: Collection[str]) -> None:
        self._dataset, self._inputs = dataset, inputs
        self._stamp = self._stamp_now()

    def changed(self) -> bool:
        """Return whether samples were edited since the last call, or since the start."""
        before, self._stamp = self._stamp, self._stamp_now()
        return before != self._stamp

    def _stamp_now(self) -> list[Any]:
        return [_stamp(value) for value in self._held()]

    def _held(self) -> Iterator[Tensor | np.ndarray | list[Tensor]]:
        """Yield what holds samples, or all that are samples' own."""
        dataset = self._dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if isinstance(dataset, TensorDataset):
            yield from (t for i, t in enumerate(dataset.tensors) if str(i) in self._inputs)
        elif type(dataset) in (list, tuple):
            items = dataset[:_MOST_ITEMS]
            for name in self._inputs:
                if all(type(item) is dict for item in items):
                    values = [item.get(name) for item in items]
                else:
                    values = [_named(item).get(name) for item in items]
                yield [value for value in values if isinstance(value, Tensor)]
        else:
            for name, value in getattr(dataset, "__dict__", {}).items():
                several = value if type(value) in (list, tuple) else [value]
                if name not in _TARGETS and len(several) <= _MOST_COLUMNS:
                    yield from (one for one in several if isinstance(one, (Tensor, np.ndarray)))


def _named(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    several = item if isinstance(item, (tuple, list)) else [item]
    return {str(place): value for place, value in enumerate(several)}


def _stamp(value: Tensor | np.ndarray | list[Tensor]) -> Any:
    if isinstance(value, list):
        try:
            return [*map(id, value)], [*map(_VERSION, value)]
        except RuntimeError:  # One was made for inference, and counts no writes.
            return [*map(_stamp, value)]
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    # A file that is mapped is read from the disk; objects have no values of their own.
    if isinstance(value, np.memmap) or not np.issubdtype(value.dtype, np.number):
        return id(value)
    return id(value), fingerprint([torch.from_numpy(np.ascontiguousarray(value).view(np.uint8))])

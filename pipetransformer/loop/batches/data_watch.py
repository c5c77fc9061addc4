"""Notice that samples in memory were edited in place, between two epochs, or are read otherwise.

what holds samples                            what tells
tensors, of a TensorDataset or items          their versions
lists of numbers, and small arrays, of items  a hash of their values
tensors in the data set's attributes          their versions, also in a list or tuple of many
numpy arrays there                            a fingerprint of their values
what else the data set and collate_fn hold    plain values, and which objects; a transform's, too

Attributes that reading itself changes, as counters or open files, are left out; so are labels,
which are compared where they are kept. Files that samples are read from are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from autocache import fingerprint

_TARGETS = ("targets", "labels")
_MOST_ITEMS, _MOST_COLUMNS, _MOST_MEMBERS, _MOST_HASHED_BYTES = 100_000, 16, 64, 1 << 12
_PLAIN = (bool, int, float, str, bytes, type(None))
_Setting = tuple[int, str, str]
"""An attribute: the id of its holder, the holder's class, and its name."""


@final
class DataWatch:
    """Watch a data set, and the collate_fn that makes its batches.

    Args:
        inputs: names of the entries that the model is given; positions, of tuples.
    """

    def __init__(self, dataset: Any, inputs: Collection[str], collate: object) -> None:
        self._dataset, self._inputs, self._collate = dataset, inputs, collate
        self._ignored = set[_Setting]()
        self._stamp, self._settings = self._stamp_now(), self._settings_now()

    def settle(self) -> None:
        """Leave out what reading samples has changed by itself since the start."""
        self._ignored |= self._take_settings()

    def changed(self, samples_differ: Callable[[], bool]) -> str:
        """Say what was changed since the last call, or since the start; "" for nothing.

        Args:
            samples_differ: asked where an attribute alone was changed, which may mean nothing.
        """
        before, self._stamp = self._stamp, self._stamp_now()
        settings = self._take_settings()
        if before != self._stamp:
            return "samples were edited in memory"
        if not settings or not samples_differ():
            return ""
        _, kind, name = next(iter(settings))
        return f"attribute {name!r} of {kind} was changed"

    def _take_settings(self) -> set[_Setting]:
        """Take attributes as they are now, and return those that were others."""
        before, self._settings = self._settings, self._settings_now()
        now = self._settings
        return {
            place
            for place in before.keys() | now.keys()
            if place not in self._ignored and not _same(before.get(place), now.get(place))
        }

    def _settings_now(self) -> dict[_Setting, Any]:
        """Return plain attributes by value, and others themselves; of what these hold, too."""
        owners = [*self._datasets(), _owner_of(self._collate)]
        inner = [value for owner in owners for value in _attributes(owner).values()]
        several = (one if type(one) in (list, tuple) else [one] for one in inner)
        held = [one for own in several for one in own[:_MOST_MEMBERS] if _is_object(one)]
        return {
            (id(owner), type(owner).__name__, name): _frozen(value)
            for owner in (*owners, *held)
            for name, value in _attributes(owner).items()
            if name not in _TARGETS and not isinstance(value, (Tensor, np.ndarray))
        }

    def _datasets(self) -> Iterator[Any]:
        dataset = self._dataset
        yield dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
            yield dataset

    def _stamp_now(self) -> list[Any]:
        return [_stamp(value) for value in self._held()]

    def _held(self) -> Iterator[Any]:
        """Yield what holds samples, or all that are samples' own."""
        *_, dataset = self._datasets()
        if isinstance(dataset, TensorDataset):
            yield from (t for i, t in enumerate(dataset.tensors) if str(i) in self._inputs)
        elif type(dataset) in (list, tuple):
            items = [*map(_named, dataset[:_MOST_ITEMS])]
            yield from ([item.get(name) for item in items] for name in self._inputs)
        else:
            for name, value in _attributes(dataset).items():
                if name not in _TARGETS:
                    yield from _samples_in(value)


def _samples_in(value: Any) -> Iterator[Any]:
    """Yield an attribute that is a tensor or an array, or a list of these."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif type(value) in (list, tuple) and value and isinstance(value[0], (Tensor, np.ndarray)):
        if len(value) <= _MOST_COLUMNS:
            yield from (one for one in value if isinstance(one, (Tensor, np.ndarray)))
        else:
            yield list(value[:_MOST_ITEMS])


def _owner_of(function: Any) -> Any:
    function = getattr(function, "func", function)  # Of a partial.
    return getattr(function, "__self__", function)


def _attributes(owner: Any) -> dict[str, Any]:
    own = getattr(owner, "__dict__", {})
    return own if type(own) is dict else {}


def _is_object(value: Any) -> bool:
    """Return whether a value has settings of its own, as a transform has."""
    is_data = isinstance(value, (Tensor, np.ndarray, nn.Module, type, FunctionType))
    return not is_data and bool(_attributes(value))


def _frozen(value: Any) -> Any:
    """Return a list of plain values, such as indices, as it is now; all else is what it is."""
    is_plain = type(value) in (list, tuple) and all(type(one) in _PLAIN for one in value)
    return _Values(value) if is_plain else value


class _Values(tuple[Any, ...]):
    """Be plain values, which are compared; other tuples are compared by identity."""


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (*_PLAIN, _Values)) and bool(one == other)


def _named(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    several = item if isinstance(item, (tuple, list)) else [item]
    return {str(place): value for place, value in enumerate(several)}


def _stamp(value: Any) -> Any:
    """Return what tells whether a tensor, an array or a list of samples' own was edited."""
    if isinstance(value, list):
        return [*map(_stamp_of_item, value)]
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    # A file that is mapped is read from the disk; objects have no values of their own.
    if isinstance(value, np.memmap) or not np.issubdtype(value.dtype, np.number):
        return id(value)
    return id(value), fingerprint([torch.from_numpy(np.ascontiguousarray(value).view(np.uint8))])


def _stamp_of_item(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _stamp(value)
    if isinstance(value, np.ndarray) and value.nbytes <= _MOST_HASHED_BYTES:
        return hash(value.tobytes())
    if type(value) is list:
        with suppress(TypeError):  # It holds lists, or others.
            return hash(tuple(value))
    return id(value)

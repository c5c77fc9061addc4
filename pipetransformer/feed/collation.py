"""Make a batch of samples: pick the entries that the model takes, and put them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from pipetransformer.config import CollateFunction
from pipetransformer.hints import did_you_mean

Batch = dict[str, Tensor]

_LABELS = ("labels", "label", "label_ids")
"""Data sets' names for the same entry."""
_TARGETS = ("target", "targets", "class", "y", "score", "scores", "answer", "tags")
"""Their names for what may be labels, and may be something else: these are not guessed."""


@dataclass(frozen=True)
class Collation:
    """Collate the items of a dataset.

    Args:
        names: entries the model knows; others are left out.
        inputs: those that must be there.
        targets: those that the loss takes.
        needs_targets: whether these must be there, too.
        function: makes a mapping, or a tuple of inputs and targets, of a list of items; None
            stacks entries of equal shapes.
        drops_unknown: whether the function gets only entries that the model knows.
        unseen: what the model's forward takes, too, but the samples that it was read by lacked.
    """

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    needs_targets: bool = True
    function: CollateFunction | None = None
    drops_unknown: bool = True
    unseen: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        return (*self.inputs, *(self.targets if self.needs_targets else ()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of a TensorDataset's tensors, in their order."""
        return (*self.inputs, *self.targets)

    def padded_together(self, num: int) -> list[range]:
        """Return the indices of `num` samples, in parts that no batch pads together."""
        return [range(num)]

    def unused(self, item: Any) -> tuple[str, ...]:
        """Name the entries of an item that the model does not know."""
        known = self._known()
        names = item if isinstance(item, Mapping) else ()
        return tuple(name for name in names if name not in known)

    def collate(self, items: list[Any], ids: Sequence[int]) -> Batch:
        """Return entries by name, (B, ...) each on the CPU.

        Raises:
            ValueError: an item lacks a required entry or one that another has, an entry is no
                tensor, shapes are unequal, or the function fails or returns something else.
        """
        if self.function is None:
            if (columns := self._columns(items)) is not None:
                return {name: stack(values, name, ids) for name, values in columns.items()}
            pairs = zip(ids, items, strict=False)
            entries = [self._named(item, f"sample {index}") for index, item in pairs]
            return {
                name: stack([item.get(name) for item in entries], name, ids)
                for name in dict.fromkeys(name for item in entries for name in item)
            }
        if self.drops_unknown:
            known = self._known() | {*self.unseen}
            items = [
                {name: value for name, value in item.items() if name in known}
                if isinstance(item, Mapping)
                else item
                for item in items
            ]
        try:
            collated = self.function(items)
        except Exception as error:
            raise ValueError(
                f"collate_fn fails for the samples {list(ids[:4])}...: {error!r}"
            ) from error
        return {
            name: _checked(value, name, len(ids))
            for name, value in self._named(collated, "what collate_fn returns").items()
        }

    def _columns(self, items: list[Any]) -> dict[str, list[Any]] | None:
        """Return the values of each entry, where all items are dicts of the same names.

        Returns:
            None where an item must be looked at by itself.
        """
        names = items[0].keys() if type(items[0]) is dict else ()
        if not names or not all(type(item) is dict and item.keys() == names for item in items):
            return None
        found = {}
        for name in dict.fromkeys((*self.names, *self.unseen)):
            own = [n for n in names_for(name) if n in names]
            values = [item[own[0]] for item in items] if len(own) == 1 else []
            if len(own) > 1 or any(value is None for value in values):
                return None
            if values:
                found[name] = values
        is_whole = found.keys() >= {*self.required} and not found.keys() & {*self.unseen}
        return found if is_whole else None

    def _known(self) -> set[str]:
        labels = _LABELS if set(_LABELS) & set(self.names) else ()
        return {*self.names, *labels}

    def _named(self, item: Any, what: str) -> dict[str, Any]:
        """Return an item's entries, or a collated batch's, by the model's names."""
        if isinstance(item, Mapping):
            self._refuse_unseen(item, what)
            given = {name: entry_of(item, name) for name in self.names}
            entries = {name: value for name, value in given.items() if value is not None}
        else:
            entries = self._in_order(item, what)
        missing = [name for name in self.required if name not in entries]
        if missing:
            has = f" and it has {list(item)}" if isinstance(item, Mapping) else ""
            advice = ""
            if self.function is not None and self.drops_unknown:
                advice = "; where it needs others than these, set remove_unused_columns=False"
            elif isinstance(item, Mapping):
                advice = _meant(missing, {*map(str, item)} - self._known())
            raise ValueError(
                f"{what} lacks {missing}; the model needs {list(self.required)}{has}{advice}"
            )
        return entries

    def _refuse_unseen(self, item: Mapping[str, Any], what: str) -> None:
        for name in self.unseen:
            if item.get(name) is not None:
                raise ValueError(
                    f"{what} has {name!r}, which the model's forward takes, but the samples by "
                    "which the model was read lacked it: give it in all samples or in none, say a "
                    "mask of ones where nothing is padded"
                )

    def _in_order(self, item: Any, what: str) -> dict[str, Any]:
        whole = (*self.inputs, *self.targets)
        if isinstance(item, (tuple, list)) and len(item) in (len(whole), len(self.required)):
            return dict(zip(whole, item, strict=False))
        size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise ValueError(
            f"{what} is a {type(item).__name__}{size}; give a mapping with the entries "
            f"{list(self.required)}, or a tuple of {len(self.required)} in that order"
        )


def entry_of(item: Mapping[str, Any], name: str) -> Any:
    """Return an item's entry, labels by any of their names; None where there is none."""
    return next((item[n] for n in names_for(name) if item.get(n) is not None), None)


def _meant(missing: list[str], others: set[str]) -> str:
    """Say which of a sample's other entries may be the first that is missing, or ""."""
    name = missing[0]
    targets = [target for target in _TARGETS if target in others and name in _LABELS]
    meant = did_you_mean(targets[:1] or [name], sorted(others))
    return f"{meant} rename it to {name!r}" if meant else ""


def names_for(name: str) -> tuple[str, ...]:
    """Return the names under which data sets may hold an entry, its own first."""
    return tuple(dict.fromkeys((name, *_LABELS))) if name in _LABELS else (name,)


def stack(values: list[Any], name: str, ids: Sequence[int]) -> Tensor:
    """Make one tensor of the samples' values of an entry, None where a sample lacks it."""
    lacking = [index for index, value in zip(ids, values, strict=True) if value is None]
    if lacking:
        raise ValueError(
            f"samples {lacking[:4]} lack the entry {name!r}, which others of their "
            "batch have; give it in all or in none"
        )
    try:
        # default_collate would take a list apart: one tensor for each position.
        whole = [torch.as_tensor(v) if isinstance(v, (list, tuple)) else v for v in values]
        batch = default_collate(whole)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the entry {name!r} of the samples {list(ids[:4])}... cannot be stacked into a batch "
            f"({error}); give tensors, arrays or numbers, padded to one length, or a collate_fn= "
            "that pads them, such as transformers' DataCollatorWithPadding(tokenizer)"
        ) from error
    if not isinstance(batch, Tensor):
        raise ValueError(
            f"the entry {name!r} of the samples {list(ids[:4])}... is a "
            f"{type(values[0]).__name__}; give tensors, arrays or numbers"
        )
    return batch.cpu()


def _checked(value: Any, name: str, num: int) -> Tensor:
    """Return an entry that collate_fn gave for `num` samples."""
    if isinstance(value, (np.ndarray, list, tuple)):
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != num:
        shape = tuple(value.shape) if isinstance(value, Tensor) else ""
        raise ValueError(
            f"collate_fn gives {name!r} as {type(value).__name__} {shape} for {num} samples; "
            f"let it return a tensor of ({num}, ...)"
        )
    return value.cpu()

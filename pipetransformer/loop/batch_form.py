"""Know the form of a loader's batches, whatever it is, by two that its collate_fn has made.

    {"input_ids": (B, S), "labels": (B,)}      entries "input_ids", "labels"
    [(B, 3, H, W), (B,), (B,)]                 entries "0", "1", "2"
    ({"x": (B, S)}, ["a", "b", ...])           entry "0.x"; the strings are no entry

An entry is a tensor with a row for each sample. A batch of entries alone can be made of rows, and
of entries that are kept. Any other is made by the loader's own collate_fn, and its samples read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pipetransformer.feed import Batch, Collation
from pipetransformer.loop.batch_entry import BatchEntry, Mark

_SIZES = (2, 4)
"""Even, as some collate_fn take even numbers of samples alone, such as timm's Mixup."""


@final
@dataclass(frozen=True)
class BatchForm:
    """Take a loader's batches apart, and put them together.

    Args:
        example: a batch.
        names: of the entries, in order.
        is_whole: whether a batch has nothing but entries.
    """

    example: Any
    names: tuple[str, ...]
    is_whole: bool

    @staticmethod
    def of(base: DataLoader[Any]) -> BatchForm:
        """Have the collate_fn of a loader make batches of its first sample."""
        dataset: Any = base.dataset
        found: list[set[str]] = []
        for size in _SIZES:
            batch = base.collate_fn([dataset[0]] * size)
            leaves = dict(_leaves(batch))
            found.append({n for n, leaf in leaves.items() if _has_rows(leaf, size)})
        names = tuple(name for name in leaves if all(name in one for one in found))
        if not names:
            has = ", ".join(f"{name!r} of {_described(leaf)}" for name, leaf in leaves.items())
            raise ValueError(
                f"a batch of {_SIZES[-1]} samples has {has}: nothing in it has a row for each "
                "sample, as a collate_fn that joins samples to one row makes it"
            )
        return BatchForm(batch, names, len(names) == len(leaves))

    @property
    def leaf_names(self) -> dict[str, Any]:
        """Return all that a batch has, by name, of the example."""
        return dict(_leaves(self.example))

    def entries_of(self, batch: Any) -> Batch:
        """Return a batch's entries, by name."""
        leaves = dict(_leaves(batch))
        return {name: leaves[name] for name in self.names if name in leaves}

    def with_entries(self, entries: Mapping[str, Tensor], batch: Any = None) -> Any:
        """Return a batch that has these entries in the place of its own."""
        like = self.example if batch is None else batch
        return _rebuilt(like, lambda name, leaf: entries.get(name, leaf))

    def to_learn_from(self, batch: Any) -> Any:
        """Return a batch whose entries say their names, and have no rows."""
        entries = self.entries_of(batch)
        num = len(next(iter(entries.values())))
        table = torch.full((num, 2), -1)
        named = {n: BatchEntry.read(Mark(n, {}, table), entry) for n, entry in entries.items()}
        return self.with_entries(named, batch)


def _has_rows(leaf: Any, num: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == num


def _described(leaf: Any) -> str:
    return str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in _children(value, path):
        yield from _leaves(child, name)
    if not _is_container(value):
        yield path, value


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    start = f"{path}." if path else ""
    if isinstance(value, Mapping):
        yield from ((f"{start}{key}", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)) and _is_container(value):
        yield from ((f"{start}{place}", child) for place, child in enumerate(value))


def _is_container(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    # A list of strings or numbers is one value for each sample, and no entry.
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, (Tensor, Mapping, list, tuple)) for one in value
    )


def _rebuilt(value: Any, make: Callable[[str, Any], Any], path: str = "") -> Any:
    if not _is_container(value):
        return make(path, value)
    children = [_rebuilt(child, make, name) for name, child in _children(value, path)]
    if isinstance(value, Mapping):
        made = dict(zip(value, children, strict=True))
        # transformers' tokenizers make a mapping that has `.to(device)`.
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if hasattr(value, "_fields"):  # A named tuple.
        return type(value)(*children)
    return type(value)(children)


@final
@dataclass(frozen=True)
class LoaderCollation(Collation):
    """Collate as a loader does, and name entries by what a model takes them for.

    Args:
        form: of the loader's batches.
        collate_fn: of the loader.
        parameters: by an entry's name, the model's parameter that is given it.
        reserved: names of parameters that no other entry may have.
    """

    form: BatchForm | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    parameters: Mapping[str, str] | None = None
    reserved: frozenset[str] = frozenset()

    @property
    def columns(self) -> tuple[str, ...]:
        assert self.form is not None
        return tuple(map(self.known_as, self.form.names)) if self.form.is_whole else ()

    def collate(self, items: list[Any], ids: Sequence[int]) -> Batch:
        assert self.form is not None and self.collate_fn is not None
        try:
            batch = self.collate_fn(items)
        except Exception as error:
            raise ValueError(
                f"the loader's collate_fn fails for the samples {list(ids[:4])}...: {error!r}"
            ) from error
        entries, known = self.form.entries_of(batch), self.form.leaf_names
        if known.keys() != (now := dict(_leaves(batch))).keys():
            odd = sorted(known.keys() ^ now.keys())
            raise ValueError(
                f"batches of the loader have {[*known]}, but not all of them have {odd}: give "
                "these in all batches, or in none"
            )
        for name in self.form.names:
            if name not in entries or not _has_rows(entries[name], len(ids)):
                raise ValueError(
                    f"batches of the loader have {list(self.form.names)}, one row for each "
                    f"sample, but that of the samples {list(ids[:4])}... has no such {name!r}: "
                    "give it in all batches"
                )
        return {name: entry.cpu() for name, entry in self.named(entries).items()}

    def named(self, entries: Batch) -> Batch:
        """Call entries by what the model takes them for."""
        return {self.known_as(name): entry for name, entry in entries.items()}

    def known_as(self, name: str) -> str:
        """Return what an entry of the loader's batches is called here."""
        assert self.parameters is not None
        return self.parameters.get(name, beside(name, self.reserved))


def beside(name: str, reserved: frozenset[str]) -> str:
    """Return what an entry is called that the model is not given."""
    return f"{name} beside" if name in reserved else name

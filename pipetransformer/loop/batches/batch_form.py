"""Know the form of a loader's batches, whatever it is, by two that its collate_fn has made.

    {"input_ids": (B, S), "labels": (B,)}      entries "input_ids", "labels"
    [(B, 3, H, W), (B,), (B,)]                 entries "0", "1", "2"
    ({"x": (B, S)}, ["a", "b", ...])           entry "0.x"; the strings are no entry
    {"input_ids": (2B, S), "margin": (B,)}     "input_ids" has two rows for each sample
    {"x": (B, S), "labels": [{...}, {...}]}    entry "x"; a list of what each sample has is none
    {"input_ids": (1, T), "labels": (1, T)}    samples joined along their tokens

An entry is a tensor with as many rows for each sample, mostly one. A batch of entries alone can
be made of rows, and of entries that are kept. Any other is made by the loader's own collate_fn,
and its samples read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from pipetransformer.feed import Batch, Collation
from pipetransformer.loop.batches.batch_entry import BatchEntry, Mark
from pipetransformer.loop.batches.bundles import bundles_of, signed
from pipetransformer.loop.batches.joined_texts import TOKENS, joined_names, padded
from pipetransformer.loop.batches.pieces import Pieces, SampleRows, order_of_rows

_MOST_ALONE = 256
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
        rows: of each entry; a bundle has any number of them for a sample.
        bundles: names of these.
        lists: where a batch has a list with an item for each sample, such as a detector's boxes.
        is_joined: whether entries are (1, T), their samples' tokens one behind the other.
    """

    example: Any
    names: tuple[str, ...]
    is_whole: bool
    rows: Mapping[str, SampleRows]
    bundles: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    is_joined: bool = False

    @staticmethod
    def of(base: DataLoader[Any], *, has_bundles: bool = False) -> BatchForm:
        """Have the collate_fn of a loader make batches of its first sample.

        Args:
            has_bundles: whether entries may have other numbers of rows for some samples.
        """
        dataset: Any = base.dataset
        batches = [base.collate_fn([dataset[0]] * size) for size in _SIZES]
        lists = _lists_of_samples(batches)
        found: list[dict[str, int]] = []
        for size, batch in zip(_SIZES, batches, strict=True):
            leaves = dict(_leaves(batch, lists))
            found.append({n: _num_rows(leaf, size) for n, leaf in leaves.items()})
        nums = {n: num for n, num in found[-1].items() if num and found[0].get(n) == num}
        rows = {n: SampleRows() for n, num in nums.items() if num == 1}
        if several := {n: num for n, num in nums.items() if num > 1}:
            collate = base.collate_fn
            rows |= order_of_rows(
                lambda items: dict(_leaves(collate(items), lists)), dataset, several
            )
        bundles = frozenset[str]()
        if has_bundles:
            bundles = bundles_of(base, lambda batch: dict(_leaves(batch, lists)), [*leaves])
            rows |= dict.fromkeys(bundles, SampleRows())
        names = tuple(name for name in leaves if name in rows)
        if not names and not has_bundles:
            own = joined_names(base.collate_fn, lambda one: dict(_leaves(one, lists)), dataset)
            if own:
                rows = dict.fromkeys(own, SampleRows())
                return BatchForm(batch, own, False, rows, lists=lists, is_joined=True)
        if not names:
            has = ", ".join(f"{name!r} of {_described(leaf)}" for name, leaf in leaves.items())
            raise ValueError(
                f"a batch of {_SIZES[-1]} samples has {has}: nothing in it has a row for each "
                "sample, as a collate_fn that joins samples to one row makes it. Along their "
                "tokens it may join them, but with nothing between or behind them"
            )
        return BatchForm(batch, names, len(names) == len(leaves), rows, bundles, lists)

    def in_pieces(self, pieces: Pieces) -> BatchForm:
        """Return the form without entries that pieces of samples have no room for."""
        names = tuple(n for n in self.names if pieces.column_of(self.rows[n]) is not None)
        return replace(self, names=names, is_whole=len(names) == len(self.leaf_names))

    def bundling(self, names: Collection[str]) -> BatchForm:
        """Return the form with these entries as bundles, and no other bundle."""
        others = self.bundles - {*names}
        held = tuple(name for name in self.names if name not in others)
        rows = {**self.rows, **dict.fromkeys(names, SampleRows())}
        return replace(
            self,
            names=held,
            is_whole=self.is_whole and not others,
            rows=rows,
            bundles=frozenset(names),
        )

    @property
    def leaf_names(self) -> dict[str, Any]:
        """Return all that a batch has, by name, of the example."""
        return self.leaves_of(self.example)

    def leaves_of(self, batch: Any) -> dict[str, Any]:
        """Return all that a batch has, by name."""
        return dict(_leaves(batch, self.lists))

    def entries_of(self, batch: Any) -> Batch:
        """Return a batch's entries, by name."""
        leaves = self.leaves_of(batch)
        return {name: leaves[name] for name in self.names if name in leaves}

    def with_entries(self, entries: Mapping[str, Tensor], batch: Any = None) -> Any:
        """Return a batch that has these entries in the place of its own."""
        like = self.example if batch is None else batch
        return _rebuilt(like, lambda name, leaf: entries.get(name, leaf), self.lists)

    def to_learn_from(self, batch: Any) -> Any:
        """Return a batch whose entries say their names, and have no rows."""
        named = {
            name: BatchEntry.read(Mark(name, {}, torch.full((len(entry), 2), -1)), entry)
            for name, entry in self.entries_of(batch).items()
        }
        return self.with_entries(named, batch)


def _num_rows(leaf: Any, num_samples: int) -> int:
    """Return how many rows a leaf has for each sample; 0 where that is no number."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) % num_samples:
        return 0
    return len(leaf) // num_samples


def _described(leaf: Any) -> str:
    return str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__


def _leaves(value: Any, lists: Collection[str] = (), path: str = "") -> Iterator[tuple[str, Any]]:
    if path in lists or not _is_container(value):
        yield path, value
        return
    for name, child in _children(value, path):
        yield from _leaves(child, lists, name)


def _lists_of_samples(batches: Sequence[Any]) -> frozenset[str]:
    """Return where batches of `_SIZES` have lists of as many items."""
    found = [dict(_lengths(batch)) for batch in batches]
    return frozenset(path for path in found[0] if tuple(one.get(path) for one in found) == _SIZES)


def _lengths(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, (list, tuple)):
        yield path, len(value)
    for name, child in _children(value, path):
        yield from _lengths(child, name)


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


def _rebuilt(
    value: Any, make: Callable[[str, Any], Any], lists: Collection[str], path: str = ""
) -> Any:
    if path in lists or not _is_container(value):
        return make(path, value)
    children = [_rebuilt(child, make, lists, name) for name, child in _children(value, path)]
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
        calls: of the model, by their columns; by an entry's name, the parameter that is given it.
        reserved: names of parameters that no other entry may have.
        pieces: of samples. Where there are several, items are theirs.
        gives_inputs_alone: whether rows have no room for what else a batch has.
        alone: bundles of samples that were read last, by index and name.
    """

    form: BatchForm | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    calls: tuple[dict[str, str], ...] = ()
    reserved: frozenset[str] = frozenset()
    pieces: Pieces = Pieces()
    gives_inputs_alone: bool = False
    alone: dict[int, Batch] = field(default_factory=dict, compare=False)

    @property
    def columns(self) -> tuple[str, ...]:
        assert self.form is not None
        return tuple(map(self.known_as, self.form.names)) if self.form.is_whole else ()

    def padded_together(self, num: int) -> list[range]:
        # All rows that a column has of a sample have one length.
        firsts = [piece for piece, (_, row) in enumerate(self.pieces.column_rows) if row == 0]
        return [range(first, num, self.pieces.num) for first in firsts]

    def collate(self, items: list[Any], ids: Sequence[int]) -> Batch:
        if TOKENS in self.targets:
            return padded([self._alone(*one) for one in zip(items, ids, strict=True)])
        if self.pieces.num == 1:
            entries = self._entries(items, ids)
            return {self.known_as(n): entries[n].cpu() for n in self._given(entries)}
        assert self.form is not None
        # Each sample once, whatever pieces of it are asked for.
        samples = {index // self.pieces.num: item for index, item in zip(ids, items, strict=True)}
        entries = self._entries([*samples.values()], [*samples])
        places = {sample: place for place, sample in enumerate(samples)}
        where = {n: self.form.rows[n].places(len(samples)).tolist() for n in entries}
        given = self._given(entries)
        beside = {n: self.known_as(n) for n in given if not any(n in one for one in self.calls)}
        numbered, chosen = self.pieces.column_rows, dict[str, list[tuple[str, int]]]()
        for index in ids:
            sample, piece = divmod(index, len(numbered))
            column, row = numbered[piece]
            for name, known in (self.calls[column] | beside).items():
                own = where[name][places[sample]]
                chosen.setdefault(known, []).append((name, own[row % len(own)]))
        return {known: _rows_at(entries, each).cpu() for known, each in chosen.items()}

    def _given(self, entries: Batch) -> list[str]:
        calls = [{*entries}] if not self.gives_inputs_alone else self.calls
        return [name for name in entries if any(name in one for one in calls)]

    def _entries(self, items: list[Any], ids: Sequence[int]) -> Batch:
        """Return the entries of a batch of these samples, by the loader's names."""
        assert self.form is not None
        batch = self._collated(items, ids)
        entries, known = self.form.entries_of(batch), self.form.leaf_names
        if known.keys() != (now := self.form.leaves_of(batch)).keys():
            odd = sorted(known.keys() ^ now.keys())
            raise ValueError(
                f"batches of the loader have {[*known]}, but not all of them have {odd}: give "
                "these in all batches, or in none"
            )
        entries |= self._signed(items, ids)
        for name in self.form.names:
            num = self.form.rows[name].num
            if _num_rows(entries.get(name), len(ids)) != num:
                raise ValueError(
                    f"batches of the loader have {list(self.form.names)}, {num} row(s) of "
                    f"{name!r} for each sample, but that of the samples {list(ids[:4])}... has "
                    f"no such {name!r}: give it in all batches"
                )
        return entries

    def _collated(self, items: list[Any], ids: Sequence[int]) -> Any:
        assert self.collate_fn is not None
        try:
            return self.collate_fn(items)
        except Exception as error:
            raise ValueError(
                f"the loader's collate_fn fails for the samples {list(ids[:4])}...: {error!r}"
            ) from error

    def _alone(self, item: Any, index: int) -> Batch:
        """Return what the model is given of a sample that others are joined to, (1, S) each."""
        assert self.form is not None
        entries = self.form.entries_of(self._collated([item], [index]))
        return {known: entries[name].cpu() for name, known in self.calls[0].items()}

    def _signed(self, items: list[Any], ids: Sequence[int]) -> Batch:
        """Return bundles, (N, 2) int64 each, and note them."""
        assert self.form is not None and self.collate_fn is not None
        if not (names := self.form.bundles & {*self.form.names}):
            return {}
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for index, item in zip(ids, items, strict=True):
            leaves = self.form.leaves_of(self.collate_fn([item]))
            while len(self.alone) >= _MOST_ALONE:
                del self.alone[next(iter(self.alone))]
            self.alone[index] = {name: leaves[name] for name in names}
            for name, signs in found.items():
                signs.append(signed(index, leaves[name]))
        return {name: torch.stack(signs) for name, signs in found.items()}

    def known_as(self, name: str) -> str:
        """Return what an entry of the loader's batches is called here."""
        taken = next((one[name] for one in self.calls if name in one), None)
        return beside(name, self.reserved) if taken is None else taken


def beside(name: str, reserved: frozenset[str]) -> str:
    """Return what an entry is called that the model is not given."""
    return f"{name} beside" if name in reserved else name


def _rows_at(entries: Batch, chosen: list[tuple[str, int]]) -> Tensor:
    """Take rows by entry and place; those of columns that no batch pads together get zeros."""
    names, places = zip(*chosen, strict=True)
    if len({*names}) == 1:
        return entries[names[0]][list(places)]
    rows = [entries[name][place] for name, place in chosen]
    return pad_sequence(rows, batch_first=True) if rows[0].ndim else torch.stack(rows)

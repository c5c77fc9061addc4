"""Have a loader begin an epoch that gives its samples' indices, collated by a function of ours.

                   as it is                    while an epoch begins
    data set       gives a sample              gives its index
    batch sampler  draws batches as needed     draws all of the epoch's, and announces them;
                                               as needed, if it draws numbers for each, or is the
                                               user's own, and may look at what the loop does
    collate_fn     makes a batch of samples    makes a batch of indices
    workers        read samples                none: the function knows how to read ahead

An iterator keeps what its loader had when it began. So whatever the loader is, accelerate's or a
subclass of torch's, it goes on in its own way, and the loop's random numbers are those it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import Any, Generic, TypeVar, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from pipetransformer.loop.batches.randomness import states_of

_T = TypeVar("_T")

_FIELDS = (
    "dataset", "batch_sampler", "collate_fn", "num_workers", "timeout", "prefetch_factor",
    "persistent_workers", "generator", "_iterator",
)  # fmt: skip
"""What is swapped, or asked, of a loader: fields of the object itself, one of them private."""
_PURE = {
    "torch", "torchvision", "timm", "accelerate", "transformers", "sentence_transformers", "trl",
    "datasets", "lightning", "lightning_fabric", "pytorch_lightning",
}  # fmt: skip
"""Packages whose samplers draw all of an epoch alike, whenever they are asked."""
_MOST_ROUNDS = 100
"""How often an epoch may give each sample, on average."""


def base_of(loader: Any) -> DataLoader[Any]:
    """Return the torch DataLoader that reads for a loader: itself, or what accelerate or
    Lightning's Fabric wrap.

    Raises:
        TypeError: it is no DataLoader, is iterable, or another process reads for it.
        ValueError: it makes no batches.
        RuntimeError: it lacks a field that this torch's loaders are to have.
    """
    base: Any = getattr(loader, "base_dataloader", loader)
    if type(base).__name__ == "_FabricDataLoader":
        base = getattr(base, "_dataloader", base)  # Lightning's own name for it.
    if not isinstance(base, DataLoader):
        raise TypeError(
            f"a {type(loader).__name__} is no torch DataLoader; give the loader that the loop "
            "takes its batches from"
        )
    if lost := [name for name in _FIELDS if name not in vars(base)]:
        raise RuntimeError(
            f"the loader, a {type(base).__name__} of torch {torch.__version__}, has no field "
            f"{lost[0]!r} of its own, by which a loop is given its rows; give a plain DataLoader, "
            "or install a torch whose loaders have it, such as 2.11"
        )
    if any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__):
        raise TypeError(
            "accelerate's DataLoaderDispatcher has rank 0 read for all ranks, which then do not "
            "know their samples; set dispatch_batches=False"
        )
    if isinstance(base.dataset, IterableDataset):
        raise TypeError(
            f"the loader's data set, a {type(base.dataset).__name__}, is iterable, and a row is "
            "found again by its sample's index; give the loader a data set with __len__ and "
            "__getitem__, for instance list(dataset)"
        )
    if base.batch_sampler is None:
        raise ValueError("the loader makes no batches (batch_size=None); give it a batch size")
    return base


def is_same_dataset(one: Any, other: Any) -> bool:
    """Return whether two data sets have the same samples.

    transformers' Trainer takes columns out of a `datasets.Dataset` anew for each evaluation; its
    fingerprint says what was done to which data.
    """
    if one is other:
        return True
    is_hashed = type(one) is type(other) and type(one).__module__.partition(".")[0] == "datasets"
    return is_hashed and one._fingerprint == other._fingerprint


def is_same_function(one: Any, other: Any) -> bool:
    """Return whether two collate_fn make the same batches; transformers makes one anew, too."""
    kind = "RemoveColumnsCollator"
    if type(one).__name__ != kind or type(other).__name__ != kind:
        return bool(one == other)
    is_same = is_same_function(one.data_collator, other.data_collator)
    return is_same and one.signature_columns == other.signature_columns


@contextmanager
def giving_indices(
    base: DataLoader[Any],
    announce: Callable[[Sequence[list[int]]], None],
    make: Callable[[list[int]], Any],
    *,
    draws: bool,
) -> Iterator[None]:
    """Let iterations that begin within the block give `make` of each batch's indices.

    Args:
        announce: told all of an epoch's batches when its first one is drawn.
        draws: whether an iteration draws a number for workers' seeds, as it did before.
    """
    swapped: dict[str, Any] = {
        "dataset": _Indices(base.dataset),
        "batch_sampler": _Announced(base, announce),
        "collate_fn": make,
        "num_workers": 0,
        "timeout": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
    }
    if not draws:
        swapped["generator"] = torch.Generator()
    # Not setattr: a loader refuses it, as its iterators would not notice. Here they should not.
    own = vars(base)
    kept, context = {name: own[name] for name in swapped}, base.multiprocessing_context
    own.update(swapped)
    base.multiprocessing_context = None
    try:
        yield
    finally:
        own.update(kept)
        base.multiprocessing_context = context


def begun_within(block: AbstractContextManager[None], loader: Any) -> Iterator[Any]:
    """Yield a loader's batches, of an iteration that begins within a block."""
    with block:
        batches = iter(loader)
        first = list(islice(batches, 1))
    yield from chain(first, batches)


class _InPlaceOf(Generic[_T]):
    """Have the attributes of what it stands for: accelerate asks a sampler for many."""

    def __init__(self, own: _T) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # Not there yet, where it is copied.
            raise AttributeError(name)
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)  # type: ignore[arg-type]


@final
class _Indices(_InPlaceOf[Any]):
    """Give each sample's index in its place."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


@final
class _Announced(_InPlaceOf[Any]):
    """Draw all batches of an epoch at its first one."""

    def __init__(
        self, base: DataLoader[Any], announce: Callable[[Sequence[list[int]]], None]
    ) -> None:
        super().__init__(base.batch_sampler)
        dataset: Any = base.dataset
        self._most, self._announce = _MOST_ROUNDS * len(dataset), announce
        self._reads_ahead = base.num_workers > 0
        sampler = getattr(base.batch_sampler, "sampler", None)
        self._owners = (base.batch_sampler, sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # Now: some samplers draw numbers here, others at their first batch.
        batches = iter(self._own)
        # Workers read ahead, so that what a loop does comes late for any sampler.
        if self._reads_ahead or _is_pure(self._own):
            return self._batches(batches)
        return self._as_needed(batches)

    def _as_needed(self, batches: Iterator[Any]) -> Iterator[list[int]]:
        self._announce([])
        yield from map(list, batches)

    def _batches(self, batches: Iterator[Any]) -> Iterator[list[int]]:
        states = states_of(self._owners)  # Behind the seed that a loader draws.
        drawn: list[list[int]] = []
        num, begun, due, draws_each = 0, None, self._num(), False
        for ids in islice(batches, due):
            drawn.append(list(ids))
            num += len(ids)
            if begun is None:
                begun = states_of(self._owners)
            elif len(drawn) == 2 and due != 2:
                draws_each = begun.differ()
            if num > self._most:
                raise ValueError(
                    f"the loader's sampler gives each sample more than {_MOST_ROUNDS} times in "
                    "an epoch, and seems to have no end; all of an epoch's indices are drawn at "
                    "its start, so give it an end"
                )
        # To give its last batch, accelerate's sampler of a rank draws all, counts an epoch, and
        # moves a generator that nobody else draws from: it must not begin anew.
        draws_each = draws_each or (begun is not None and begun.differ(held=False))
        if draws_each and not self._reads_ahead:
            # It draws numbers for each batch, between those of the loop: so it must go on.
            states.put_back()
            yield from self._as_needed(iter(self._own))
            return
        self._announce(drawn)
        yield from drawn
        yield from batches

    def _num(self) -> int | None:
        """Return how many batches are drawn at once; None for all there are."""
        # A sampler may draw a number when there is no batch left, which a loop may never ask for.
        # Workers do, as they read ahead.
        if self._reads_ahead:
            return None
        try:
            return len(self)
        except TypeError:
            return None


def _is_pure(sampler: Any) -> bool:
    """Return whether a sampler, and those within it, are of packages that are known."""
    kind = type(sampler).__module__.partition(".")[0]
    own = kind in _PURE or isinstance(sampler, (list, tuple, range))
    held = [getattr(sampler, name, None) for name in ("sampler", "batch_sampler")]
    return own and all(_is_pure(one) for one in held if one is not None)

"""Know which fetches come next, as long as nothing changes who trains which samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeAlias, TypeVar, final

import torch
from torch import Tensor

Coming: TypeAlias = Callable[[], Iterable[tuple[int, Tensor]]]
"""Yields the epoch and (B,) samples of every fetch to come, the next one first."""

MOST_LATER = 16
"""Fetches ahead that are known: the most that are read at once, or searched for misses."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Fetch:
    """Name the samples of a fetch, and those of the next fetches in its epoch.

    Args:
        ids: (B,) int64.
        later: (b,) int64 each, the next fetch's first.
    """

    epoch: int
    ids: Tensor
    later: tuple[Tensor, ...] = ()

    def later_ids(self, most: int) -> Tensor:
        """Return the samples of at most `most` fetches after this one, (N,)."""
        return torch.cat([self.ids[:0], *self.later[:most]])


def with_later(coming: Iterable[tuple[int, Tensor]]) -> Iterator[Fetch]:
    """Yield each fetch with those after it."""
    window: deque[tuple[int, Tensor]] = deque()
    iterator = iter(coming)
    while True:
        while len(window) < MOST_LATER and (following := next(iterator, None)) is not None:
            window.append(following)
        if not window:
            return
        epoch, ids = window.popleft()
        yield Fetch(epoch, ids, tuple(i for e, i in window if e == epoch))


@final
class Follower(Generic[_T]):
    """Follow what really happens along a forecast of it.

    Args:
        forecast: starts the forecast anew, from where the run is now.
    """

    def __init__(self, forecast: Callable[[], Iterable[_T]]) -> None:
        self._forecast = forecast
        self._coming: Iterator[_T] | None = None

    def next_one(self, fits: Callable[[_T], bool]) -> _T | None:
        """Return the forecast's next item if it fits; None if even a new forecast's does not."""
        for begins in (False, True):
            if begins:  # What came was not expected: perhaps a new forecast knows better.
                self._coming = iter(self._forecast())
            item = None if self._coming is None else next(self._coming, None)
            if item is not None and fits(item):
                return item
        self._coming = None
        return None

    def skip(self, num: int) -> None:
        """Take some items as having happened."""
        if self._coming is not None:
            deque(islice(self._coming, num), maxlen=0)

    def forget(self) -> None:
        """Start the forecast anew at the next item."""
        self._coming = None

"""Know which fetches follow the one that is made, as long as nothing changes who trains what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

Coming: TypeAlias = Callable[[], Iterable[tuple[int, Tensor]]]
"""Yields the epoch and (B,) samples of every fetch to come, the next one first."""

_MOST_LATER = 8
"""Fetches that are looked at beyond one: enough to find samples that were cached as deep."""


@dataclass(frozen=True)
class Fetch:
    """Name the samples of a fetch, and those of the next ones in its epoch.

    Args:
        epoch: of the run.
        ids: (B,) int64.
        later: (N,) int64, the sooner first.
    """

    epoch: int
    ids: Tensor
    later: Tensor


def with_later(coming: Iterable[tuple[int, Tensor]]) -> Iterator[Fetch]:
    """Yield each fetch with those after it."""
    window: deque[tuple[int, Tensor]] = deque()
    iterator = iter(coming)
    while True:
        while len(window) <= _MOST_LATER and (following := next(iterator, None)) is not None:
            window.append(following)
        if not window:
            return
        epoch, ids = window.popleft()
        yield Fetch(epoch, ids, torch.cat([ids[:0], *(i for e, i in window if e == epoch)]))


@final
class FollowedFetches:
    """Follow the fetches that are made through those that were to come."""

    def __init__(self, to_come: Coming) -> None:
        self._to_come = to_come
        self._fetches: Iterator[Fetch] | None = None

    def later(self, epoch: int, ids: Tensor) -> Tensor:
        """Return the samples that follow those fetched now; none if these were not to come."""
        for begins in (False, True):
            if begins:
                self._fetches = with_later(self._to_come())
            fetch = None if self._fetches is None else next(self._fetches, None)
            if fetch is not None and fetch.epoch == epoch and torch.equal(fetch.ids, ids):
                return fetch.later
        self._fetches = None
        return ids[:0]

    def forget(self) -> None:
        """Begin anew, at the next fetch."""
        self._fetches = None

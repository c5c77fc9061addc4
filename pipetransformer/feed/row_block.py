"""Rows of several steps that were read at once, as long as they are what steps ask for.

    read      t .. t + 15                             t + 16 .. t + 31
    steps     t, t + 1, ..., t + 15                   t + 16, ...

Where a step's rows are few bytes, to begin a read takes longer than to copy them. So rows are
looked for, checked and copied for up to 16 steps together, and a step takes its own. Rows that are
read early are dropped where the next step is another one, or the frozen layers have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import final

import torch
from torch import Tensor

from autocache import CacheStats, Positions, own_lengths
from pipetransformer.feed.collation import Batch


@final
class RowBlock:
    """Hold the rows of some steps of an epoch, in their order.

    Args:
        stamps: of the frozen layers that the rows have passed.
        steps: (B,) int64 each, the samples.
        batch: entries of all of them, (sum of B, ...) each.
        stats: what reading them came to.
        positions: where samples are padded to the longest of a step.
    """

    def __init__(
        self,
        epoch: int,
        stamps: Sequence[int],
        steps: Sequence[Tensor],
        batch: Batch,
        stats: CacheStats,
        *,
        positions: Positions | None,
    ) -> None:
        self._epoch, self._stamps, self._positions = epoch, stamps, positions
        self._steps, self._next = steps, 0
        sizes = [len(step) for step in steps]
        parts = {name: entry.split(sizes) for name, entry in batch.items()}
        # `.data`, so that each counts writes by itself: of one step they are none of another's.
        self._parts = [{n: part[i].data for n, part in parts.items()} for i in range(len(sizes))]
        self._stats = _shared(stats, sizes)

    @property
    def has_more(self) -> bool:
        return self._next < len(self._steps)

    def fits(self, ids: Tensor, epoch: int, stamps: Sequence[int]) -> bool:
        """Return whether the next step has these samples, behind these layers."""
        is_next = epoch == self._epoch and torch.equal(ids, self._steps[self._next])
        return is_next and tuple(stamps) == self._stamps

    def take(self) -> tuple[Batch, CacheStats]:
        """Return the next step's entries, (B, ...) each, and its share of what reading took."""
        batch, stats = self._parts[self._next], self._stats[self._next]
        self._next += 1
        positions = self._positions
        if positions is not None:
            batch = positions.resize(batch, int(own_lengths(batch[positions.mask]).max()))
        return batch, stats


def hit_together(
    steps: Sequence[Tensor], hits: Callable[[Tensor], Tensor], *, most_rows: int
) -> list[Tensor]:
    """Return the first steps whose samples all hit, of at most `most_rows` rows together.

    Args:
        hits: returns (N,) bool for (N,) samples.
    """
    chosen, num_rows = list[Tensor](), 0
    for step in steps:
        num_rows += len(step)
        if num_rows > most_rows:
            break
        chosen.append(step)
    if len(chosen) < 2:
        return []
    found = hits(torch.cat(chosen)).split([len(step) for step in chosen])
    return chosen[: sum(1 for _ in takewhile(torch.all, found))]


def _shared(stats: CacheStats, sizes: Sequence[int]) -> list[CacheStats]:
    """Share counts among steps; the first have the samples whose rows proved to be of no use."""
    seconds, upgrades, misses = stats.seconds / len(sizes), stats.upgrades, stats.misses
    shares = []
    for size in sizes:
        missed = min(size, misses)
        upgraded = min(size - missed, upgrades)
        misses, upgrades = misses - missed, upgrades - upgraded
        shares.append(CacheStats(size - missed - upgraded, upgraded, missed, seconds))
    return shares

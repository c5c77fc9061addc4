"""Compare rows, by their digests, with the samples that the dataset gives now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore
from autocache.prefix_chunks import FoundSamples, LoadedSamples, each_once
from autocache.row_content import RowContent

_DENSE_CHECKS, _SPARSE_CHECKS = 4, 32
"""One row in 4 is checked in the first pass over the store's rows, then one in 32. The first pass
misses c changed samples with a chance of (3/4)**c: 24 % for 5, less than 1 % for 20. Each later
pass misses them with (31/32)**c."""

_FACTORS = tuple(factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9))
"""Odd, as signed numbers of 64 bits."""

_LOGGER = logging.getLogger(__name__)


@final
class SampleChecks:
    """Check rows of a store, and give new rows their digests.

    Args:
        known: (rows,) int64, digests of samples that the data set gave in this run, 0 for none
            yet. Rows of other runs are read only if theirs are the same. None where all rows are
            of this run, or are trusted.
    """

    def __init__(
        self, store: ActivationStore | None, content: RowContent, known: Tensor | None = None
    ) -> None:
        self._store, self._content, self.known = store, content, known

    def loads(
        self, samples: FoundSamples, reads: int, known: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Choose which samples to load: those that miss, and some that hit.

        Returns (N,) ids, each once, and the (C,) positions of the samples that are only checked.
        """
        misses, hits = samples.found == 0, samples.found.nonzero().flatten()
        checked = hits
        if len(hits):
            due = self._due(samples.ids[hits], reads)
            if known is not None:
                due |= known[samples.row_ids[hits]] == 0
            checked = hits[due]
        return each_once(torch.cat((samples.ids[misses], samples.ids[checked])))[0], checked

    def of_other_samples(self, samples: FoundSamples, digests: Tensor) -> Tensor:
        """Return (B,) bool: whose rows are of other samples than the data set gave in this run."""
        found = samples.found > 0
        if self.known is None or not len(digests):
            return torch.zeros_like(found)
        known = self.known[samples.row_ids.where(found, 0)]
        return found & (known != 0) & (known != digests)

    def first_compared(
        self, samples: FoundSamples, checked: Tensor, digests: Tensor, loaded: LoadedSamples
    ) -> Tensor:
        """Return which `checked` positions differ, of samples that were not known yet."""
        if self.known is None or not len(checked):
            return checked[:0]
        rows = samples.row_ids[checked]
        checked = checked[self.known[rows] == 0]
        if not len(checked):
            return checked
        given = self._content.digests(loaded.entries_of(samples.ids[checked]))
        self.known[samples.row_ids[checked]] = given
        return checked[given != digests[checked]]

    def are_current(self, ids: Tensor, digests: Tensor, loaded: LoadedSamples) -> bool:
        """Compare rows with the dataset's samples, or have a thread do it; False if one differs.

        A store that checks in the background answers True at once. The step that used a wrong row
        is then the last one that does. `digests` are the rows'.
        """

        def check() -> bool:
            given = self._content.digests(loaded.entries_of(ids))
            differing = (given != digests).nonzero().flatten().tolist()
            if differing and self._store is not None and self._store.condemn():
                _LOGGER.warning(
                    "the dataset gives another sample %d than when its activations were cached "
                    "(random augmentation, or its data changed): the cache is not used any more, "
                    "and the frozen prefix is computed at every step. Make the dataset "
                    "deterministic, or keep no cache",
                    int(ids[differing[0]]),
                )
            return not differing

        return self._store is None or not len(ids) or self._store.holds(check)

    def digests_of(
        self, samples: FoundSamples, chosen: Tensor, read: Tensor, loaded: LoadedSamples
    ) -> Callable[[], Tensor] | None:
        """Return a function that gives the digests of the samples at some positions.

        `read` are the (B,) digests of the rows that were found; empty if none was.
        """
        if self._store is None or not self._content.checked:
            return None
        misses = samples.found[chosen] == 0
        ids, rows = samples.ids[chosen[misses]], samples.row_ids[chosen[misses]]
        # A copy: the next reads write into that memory, perhaps before a thread calls `give`.
        digests = read[chosen] if len(read) else torch.zeros_like(chosen)

        def give() -> Tensor:
            if len(ids):
                given = self._content.digests(loaded.entries_of(ids))
                digests[misses] = given
                if self.known is not None:
                    has_row = rows < len(self.known)
                    self.known[rows[has_row]] = given[has_row]
            return digests

        return give

    def _due(self, ids: Tensor, reads: int) -> Tensor:
        """Return (N,) bool: which hits are checked; `reads` rows were read before.

        The choice follows from the sample and the number of the pass over the store's rows. So
        each pass checks other samples, even where the order never changes.
        """
        if not self._content.checked:
            return torch.zeros(len(ids), dtype=torch.bool)
        if self._content.checks_every:
            return torch.ones(len(ids), dtype=torch.bool)
        assert self._store is not None
        # A hash of sample and pass: every process makes the same choice.
        passes = (reads + torch.arange(len(ids))) // self._store.num_rows
        mixed = (ids + 1) * _FACTORS[0] + passes * _FACTORS[1]
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[1]
        every = torch.where(passes == 0, _DENSE_CHECKS, _SPARSE_CHECKS)
        return ((mixed >> 33) & 0x3FFFFFFF) % every == 0

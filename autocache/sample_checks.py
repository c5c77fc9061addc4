"""Compare rows, by their digests, with the samples that the dataset gives now."""

from __future__ import annotations

import logging
from typing import final

import torch
from torch import Tensor

from autocache.device_store import ActivationStore
from autocache.prefix_chunks import FoundSamples, LoadedSamples, each_once
from autocache.row_content import DIGEST, RowContent
from autocache.store import FurtherRows

_DENSE_CHECKS, _SPARSE_CHECKS = 4, 32
"""One row in 4 is checked in the first pass over the store's rows, then one in 32. The first pass
misses c changed samples with a chance of (3/4)**c: 24 % for 5, less than 1 % for 20. Each later
pass misses them with (31/32)**c."""

_FACTORS = tuple(one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9))
"""Odd, as signed numbers of 64 bits."""

_LOGGER = logging.getLogger(__name__)


@final
class SampleChecks:
    """Check rows of a store, and give new rows their digests."""

    def __init__(self, store: ActivationStore | None, content: RowContent) -> None:
        self._store, self._content = store, content

    def loads(self, samples: FoundSamples, reads: int) -> tuple[Tensor, Tensor]:
        """Choose which samples to load: those that miss, and some that hit.

        Returns:
            (N,) ids, each once, and the (C,) positions of the samples that are only checked.
        """
        misses, hits = samples.found == 0, samples.found.nonzero().flatten()
        checked = hits[self._due(samples.ids[hits], reads)] if len(hits) else hits
        return each_once(torch.cat((samples.ids[misses], samples.ids[checked])))[0], checked

    def are_current(self, ids: Tensor, digests: Tensor, loaded: LoadedSamples) -> bool:
        """Compare rows with the dataset's samples, or have a thread do it; False if one differs.

        A store that checks in the background answers True at once. The step that used a wrong row
        is then the last one that does. `digests` are the rows'.
        """

        def check() -> bool:
            given = self._content.digests(loaded.of(ids))
            differing = (given != digests).nonzero().flatten().tolist()
            if differing and self._store is not None and self._store.condemn():
                _LOGGER.warning(
                    "the dataset gives another sample %d than when its activations were cached "
                    "(random augmentation, or its data changed): the cache is not used any more, "
                    "and the frozen prefix is computed at every step. Make the dataset "
                    "deterministic, or set cache=False",
                    int(ids[differing[0]]),
                )
            return not differing

        return self._store is None or not len(ids) or self._store.holds(check)

    def digests_of(
        self, samples: FoundSamples, chosen: Tensor, read: Tensor, loaded: LoadedSamples
    ) -> FurtherRows | None:
        """Return a function that gives the digests of the samples at some positions.

        `read` are the (B,) digests of the rows that were found; empty if none was.
        """
        if self._store is None or not self._content.checked:
            return None
        misses = samples.found[chosen] == 0
        ids = samples.ids[chosen[misses]]
        # A copy: the next reads write into that memory, perhaps before a thread calls `give`.
        digests = read[chosen] if len(read) else torch.zeros_like(chosen)

        def give() -> dict[str, Tensor]:
            if len(ids):
                digests[misses] = self._content.digests(loaded.of(ids))
            return {DIGEST: digests}

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

"""Hold rows against the samples that the dataset gives now, by their digests."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, FurtherRows
from autocache.prefix_chunks import FoundSamples, of_ids
from autocache.row_content import DIGEST, RowContent

_DENSE_CHECKS, _SPARSE_CHECKS = 4, 32
"""One row in so many is checked: of as many reads as the store has rows, and from then on. Where c
samples have changed, the first pass finds none of them with a chance of (3/4)**c, each later one
with (31/32)**c: of 5 samples 24 %, of 20 less than 1 %."""

_FACTORS = tuple(one - (1 << 64) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9))
"""Odd, as signed numbers of 64 bits."""

_LOGGER = logging.getLogger(__name__)


@final
class SampleChecks:
    """Check rows of a store, and give new ones what they are to be checked by."""

    def __init__(self, store: ActivationStore, content: RowContent) -> None:
        self._store, self._content = store, content

    def due(self, ids: Tensor, reads: int) -> Tensor:
        """Return (N,) bool: which of the samples whose rows are read are checked.

        It follows from the sample and the pass over the store's rows, so that in any order, the
        same in every pass included, each pass looks at others.

        Args:
            ids: (N,) int64.
            reads: rows that were read before.
        """
        if not self._content.checked:
            return torch.zeros(len(ids), dtype=torch.bool)
        if self._content.checks_every:
            return torch.ones(len(ids), dtype=torch.bool)
        passes = (reads + torch.arange(len(ids))) // self._store.num_rows
        mixed = (ids + 1) * _FACTORS[0] + passes * _FACTORS[1]
        mixed = (mixed ^ (mixed >> 29)) * _FACTORS[1]
        every = torch.where(passes == 0, _DENSE_CHECKS, _SPARSE_CHECKS)
        return ((mixed >> 33) & 0x3FFFFFFF) % every == 0

    def are_current(
        self, ids: Tensor, digests: Tensor, held: Tensor, loaded: Mapping[str, Tensor]
    ) -> bool:
        """Compare samples read with the dataset's, or have it done; False if one differs.

        Done within the fetch, nothing is used that was found to be wrong, so it is done there
        where it takes little beside a step. It is beside a GPU's that it takes much: there the
        step that has used the row is the last one.

        Args:
            ids, digests: (N,) of the rows, as they were read.
            held, loaded: the ids that were loaded, and their entries.
        """
        store, content = self._store, self._content

        def check() -> bool:
            given = content.digests(of_ids(loaded, held, ids))
            differing = (given != digests).nonzero().flatten().tolist()
            if differing and store.condemn():
                _LOGGER.warning(
                    "the dataset gives another sample %d than when its activations were cached "
                    "(random augmentation, or its data changed): the cache is not used any more, "
                    "and the frozen prefix is computed at every step. Make the dataset "
                    "deterministic, or set cache=False",
                    int(ids[differing[0]]),
                )
            return not differing

        return not len(ids) or store.holds(check)

    def digests_of(
        self,
        samples: FoundSamples,
        chosen: Tensor,
        read: Tensor,
        held: Tensor,
        loaded: Mapping[str, Tensor],
    ) -> FurtherRows | None:
        """Return what gives the digests of the samples at some positions, once they are needed.

        Args:
            read: (B,) those of the rows that were found.
            held, loaded: the ids that were loaded, and their entries.
        """
        if not self._content.checked:
            return None
        misses = samples.found[chosen] == 0
        ids = samples.ids[chosen[misses]]
        # A copy: others are soon read into their memory.
        digests = read[chosen] if len(read) else torch.zeros_like(chosen)

        def give() -> dict[str, Tensor]:
            if len(ids):
                digests[misses] = self._content.digests(of_ids(loaded, held, ids))
            return {DIGEST: digests}

        return give

"""Compute some kept rows again before any is read: stamps do not know all of the code.

A module may call a function that was changed since, in a file that no stamp covers. Then all of
its rows are wrong, so a few of each depth tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from autocache import HIDDEN, KeptStore, PrefixCache, RowContent, own_lengths
from pipetransformer.feed.collation import Batch
from pipetransformer.feed.frozen_prefix import FrozenPrefix
from pipetransformer.feed.samples import Samples

_NUM_COMPUTED = 4
"""Rows of each depth."""


@final
@dataclass(frozen=True)
class KeptProof:
    """Compute rows as a run would, and compare them with those that are kept."""

    prefix: FrozenPrefix
    samples: Samples
    content: RowContent
    chunk_size: int
    device: torch.device

    def holds(self, store: KeptStore, row_ids: Tensor) -> bool:
        """Tell whether rows are what this run computes.

        Args:
            row_ids: (N,) int64, the row of each of the data set's samples, in their first view.
        """
        found = store.find(row_ids, self.prefix.stamps)
        for depth in found.unique().tolist():
            ids = (found == depth).nonzero().flatten()[:_NUM_COMPUTED]
            if depth and not self._holds_at(depth, store, ids, row_ids[ids]):
                return False
        return True

    def _holds_at(self, depth: int, store: KeptStore, ids: Tensor, rows: Tensor) -> bool:
        kept, fresh = (self._fetch(one, depth, ids, rows) for one in (store, None))
        mine, theirs = fresh[HIDDEN], kept[HIDDEN]
        if self.content.padding_mask is not None and mine.ndim > 2:
            # Padding is computed, but not kept.
            num = int(own_lengths(fresh[self.content.padding_mask]).min())
            mine, theirs = mine[:, :num], theirs[:, :num]
        return _are_equal(mine, theirs, rounded_to=self.content.dtype)

    def _fetch(self, store: KeptStore | None, depth: int, ids: Tensor, rows: Tensor) -> Batch:
        cache = PrefixCache(
            self.prefix.run_layers,
            chunk_size=self.chunk_size,
            store=store,
            stamps=self.prefix.stamps,
            device=self.device,
            content=replace(self.content, changed=None),
            # Rows of samples that have changed prove nothing, and are emptied.
            known=None if store is None else torch.zeros(store.num_rows, dtype=torch.int64),
        )
        try:
            return cache.fetch(ids, self._load, depth=depth, row_ids=rows, keeps=False)
        finally:
            cache.close()

    def _load(self, ids: Tensor) -> Batch:
        return self.samples.probe(ids.tolist())


def _are_equal(mine: Tensor, theirs: Tensor, *, rounded_to: torch.dtype | None) -> bool:
    """Tell whether hidden states are equal, but for what the order of a sum may change."""
    if not mine.is_floating_point():
        return torch.equal(mine, theirs)
    if rounded_to is None:
        step = 16 * torch.finfo(mine.dtype).eps
    elif rounded_to.is_floating_point:
        step = 2 * torch.finfo(rounded_to).eps  # A last bit may be rounded to the next step.
    else:
        step = 2 / torch.iinfo(rounded_to).max
    most = step * float(mine.abs().max())
    return torch.allclose(mine, theirs, rtol=0.0, atol=most, equal_nan=True)

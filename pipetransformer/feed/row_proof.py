"""Compute some kept rows again before any is read: stamps do not know all of the code.

A module may call a function that was changed since, in a file that no stamp covers. Then all rows
of a set are wrong, so a few tell. All who write a set have compared with it, or began it:

    a set         that this run writes                   that another run writes
    has no row    is begun, and read from now on         is compared once it has
    has rows      4 are computed again when it is        4 are computed again when the first are
                  opened                                 asked for
      alike       it is read, and added to               it is read
      others      it is removed, and begun anew          it is left, and all rows are computed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from autocache import (
    HIDDEN,
    ActivationStore,
    KeptStore,
    PrefixCache,
    RowContent,
    by_position,
    own_lengths,
)
from pipetransformer.feed.collation import Batch
from pipetransformer.feed.samples import Samples, spread

CacheOver: TypeAlias = Callable[[ActivationStore | None, RowContent, Tensor | None], PrefixCache]
"""Makes a cache of the frozen prefix over a store, of some content, with known digests."""

_NUM_COMPUTED = 4
"""Rows of each depth."""
_ALLOWED = 5e-5
"""Relative; float32's rounding in a hundred layers stays below, a changed constant seldom does."""


@final
@dataclass(frozen=True)
class RowProof:
    """Compute rows as a run would, and compare them with those that are kept."""

    cache_over: CacheOver
    stamps: Sequence[int]
    samples: Samples
    content: RowContent
    view: int

    def holds(self, store: KeptStore, ids: Tensor, row_ids: Tensor) -> bool:
        """Return whether others' rows are what this run computes; from then on they are read.

        Args:
            ids, row_ids: (N,) int64 each, samples, and their rows in this view.
        """
        found = store.find_unproven(row_ids, self.stamps)
        for depth in found[found > 0].unique().tolist():
            places = (found == depth).nonzero().flatten()
            places = places[spread(len(places), _NUM_COMPUTED)]
            store.trust(self.stamps[depth - 1])
            if not self._holds_at(depth, store, ids[places], row_ids[places]):
                return False
        return True

    def _holds_at(self, depth: int, store: KeptStore, ids: Tensor, rows: Tensor) -> bool:
        kept, fresh = (self._fetch(source, depth, ids, rows) for source in (store, None))
        mine, theirs = fresh[HIDDEN], kept[HIDDEN]
        mask = self.content.padding_mask
        if mask is not None and by_position(mine, fresh[mask].shape[1]):
            # Padding is computed, but not kept; a sample's other text may be the longer one.
            lengths = own_lengths(fresh[mask])
            num = min(mine.shape[1], theirs.shape[1])
            if int(lengths.max()) > num:
                return False
            own = torch.arange(num) < lengths[:, None]
            mine, theirs = mine[:, :num][own], theirs[:, :num][own]
        return are_alike(mine, theirs, rounded_to=self.content.dtype)

    def _fetch(self, store: KeptStore | None, depth: int, ids: Tensor, rows: Tensor) -> Batch:
        # Rows of samples that have changed prove nothing, and count as missing.
        known = None if store is None else torch.zeros(store.num_rows, dtype=torch.int64)
        cache = self.cache_over(store, replace(self.content, changed=None), known)
        try:
            return cache.fetch(ids, self._load, depth=depth, row_ids=rows, keeps=False)
        finally:
            cache.close()

    def _load(self, ids: Tensor) -> Batch:
        return self.samples.probe(ids.tolist(), view=self.view)


def are_alike(mine: Tensor, theirs: Tensor, *, rounded_to: torch.dtype | None) -> bool:
    """Return whether (N, ..., D) hidden states are equal, but for the order of sums and rounding.

    Each number is held against its own size and that of most in its token: a few channels may be
    a thousand times larger than the others.
    """
    if not mine.is_floating_point() or torch.equal(mine, theirs):
        return torch.equal(mine, theirs)
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return False
    mine, theirs = (values.double().nan_to_num(0.0, 0.0, 0.0) for values in (mine, theirs))
    sizes = mine.abs()
    if rounded_to is not None and not rounded_to.is_floating_point:
        # One step of the scale, which is that of the token's largest number.
        allowed = sizes.amax(-1, keepdim=True) * 1.01 / torch.iinfo(rounded_to).max
    else:
        step = _ALLOWED if rounded_to is None else 2 * torch.finfo(rounded_to).eps
        allowed = step * (sizes + sizes.median(-1, keepdim=True).values)
    return bool(((mine - theirs).abs() <= allowed).all())

"""Find and write rows of the frozen prefix in a store; without a store every row misses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, NewRows, RowRead
from autocache.prefix_chunks import NOTHING
from autocache.row_content import DIGEST, RowContent, own_lengths

_LOGGER = logging.getLogger(__name__)


class PrefixRows:
    """Keep rows by row id, each under the stamp of the depth it was computed to.

    Args:
        stamps: by depth, from depth 1 on. The caller changes this list at a freeze or a thaw.
    Attributes:
        has_misfits: whether samples came whose rows do not fit the store.
    """

    def __init__(
        self, store: ActivationStore | None, content: RowContent, stamps: Sequence[int]
    ) -> None:
        self._store, self._content, self._stamps = store, content, stamps
        # Deeper layers must not run on a rounded row: their output would be rounded again.
        self._rounds = content.dtype not in (None, content.computed_dtype)
        self.has_misfits = False

    @property
    def num_rows(self) -> int:
        return 0 if self._store is None else self._store.num_rows

    def is_used(self) -> bool:
        return self._store is not None and not self._store.is_condemned()

    def takes_all(self) -> bool:
        """Return whether every row that is written now is found later."""
        is_writable = self._store is not None and self._store.is_writable
        return is_writable and self.is_used() and not self.has_misfits

    def find(self, row_ids: Tensor, depth: int, *, done: Tensor = NOTHING[0]) -> Tensor:
        """Return the (B,) depths of usable rows, 0 for none; `done` are written by then."""
        if self._store is None or not self.is_used():
            return torch.zeros_like(row_ids)
        found = self.usable(self._store.find(row_ids, self.stamps_to(depth)), depth)
        return found.masked_fill(torch.isin(row_ids, done), depth) if len(done) else found

    def read(self, row_ids: Tensor, depth: int) -> RowRead:
        """Read rows into new memory."""
        assert self._store is not None
        read = self._store.read(row_ids, self.stamps_to(depth))
        self._store.warn_of_damage(read)
        return read

    def usable(self, found: Tensor, depth: int) -> Tensor:
        """Return the depths at which rows were found, 0 where rows would be rounded twice."""
        return found.where(found == depth, 0) if self._rounds else found

    def stamps_to(self, depth: int) -> tuple[int, ...]:
        """Return the stamps of depths 1..depth."""
        if depth > len(self._stamps):
            raise ValueError(
                f"depth {depth} has no stamp, as {len(self._stamps)} layers are frozen; choose a "
                "depth up to that, or extend the stamps first"
            )
        return tuple(self._stamps[:depth])

    def write(
        self,
        row_ids: Tensor,
        fresh: dict[str, Tensor],
        depth: int,
        digests: Callable[[], Tensor] | None,
    ) -> None:
        """Write fresh entries, "hidden" as stored, where they fit; others are never kept.

        Args:
            digests: gives the rows' digests, on the thread that writes; None where they have none.
        """
        if self._store is None or bool((row_ids >= self.num_rows).all()):
            return
        lengths, positions = self._content.lengths(fresh), self._content.positions
        if positions is not None:
            # A sample longer than a row gets an id without a row.
            fits = own_lengths(fresh[positions.mask]) <= positions.most
            row_ids = row_ids.where(fits, self.num_rows)
            fresh = positions.resize(fresh, positions.most)
        if self._fit(fresh):
            rows: NewRows = fresh if digests is None else {**fresh, DIGEST: digests}
            self._store.write(row_ids, self._stamps[depth - 1], rows, lengths)

    def clear(self, row_ids: Tensor) -> None:
        """Make rows empty."""
        if self._store is not None:
            self._store.clear(row_ids)

    def settle(self) -> None:
        """Have all rows written."""
        if self._store is not None:
            self._store.settle()

    def _fit(self, rows: dict[str, Tensor]) -> bool:
        """Return whether rows are as the store's; warn at the first that are not."""
        assert self._store is not None
        wanted = {field.name: (field.shape, field.dtype) for field in self._store.layout.fields}
        odd = {n: r for n, r in rows.items() if (tuple(r.shape[1:]), r.dtype) != wanted.get(n)}
        if odd and not self.has_misfits:
            self.has_misfits = True
            name, row = next(iter(odd.items()))
            _LOGGER.warning(
                "samples are not kept in the cache where %r is %s %s, as it was %s %s in the "
                "sample that the cache was made for: pad samples to one length, or let collate_fn "
                "pad them behind their end",
                name,
                tuple(row.shape[1:]),
                row.dtype,
                *wanted[name],
            )
        return not odd

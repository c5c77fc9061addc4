"""Read and write rows that are kept between runs: one set of them for each depth.

depth     0        2                 4                  6
set                rows of depth 2   rows of depth 4    rows of depth 6
a run              reads and writes  upgrades these ─►  has reached

In a store of one run a row is overwritten when its prefix grows. Here it stays for the next run,
which begins at depth 2 again. One run at a time writes a set, see `row_sets`. Others read the rows
that are there, and compute those that are not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from autocache.activation_store import NewRows, RowRead, Rows, Stamps, StoreProxy
from autocache.layout import RowLayout
from autocache.row_pool import RowPool
from autocache.row_sets import OpenSet, RowSets

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptRows:
    """Say where rows are kept, and what decides what they hold.

    Args:
        made_from: beside the layers: data, processing, kind of device; plain values of JSON.
        about: what a person wants to know of them.
        run: a number of the run that reads and writes them, the same in all its processes.
    """

    sets: RowSets
    made_from: Mapping[str, Any]
    about: Mapping[str, Any]
    run: int

    def made_at(self, stamp: int) -> dict[str, Any]:
        return {**self.made_from, "stamp": f"{stamp:016x}"}


@final
class KeptStore(StoreProxy):
    """Find rows of any depth, and write each depth into its own set; see `RowStore`.

    Every process of a node opens its own, and closes it.

    Args:
        stamp: of the depth that is wanted; its set is made where there is none.
        num_rows: rows that a new set has, if there is room for them.
    Raises:
        OSError: the set of this stamp cannot be made.

    Sets that have rows are neither read nor written before the caller trusts them: it proves first
    that it computes alike.
    """

    def __init__(self, kept: KeptRows, layout: RowLayout, num_rows: int, *, stamp: int) -> None:
        self._kept, self._is_condemned = kept, False
        self._trusted: set[int] = set()
        self._first = kept.sets.obtain(kept.made_at(stamp), layout, num_rows, kept.about)
        super().__init__(self._first.store)
        self.layout = layout  # The same one, with the length that is expected.
        self._sets: dict[int, OpenSet | None] = {stamp: self._first}
        self._may_write(self._first, stamp)
        # The set of layers that were edited since: one at a time, or each edit would leave one.
        self._edited: int | None = None

    @property
    def folder(self) -> Path:
        return self._kept.sets.folder

    @property
    def num_bytes(self) -> int:
        return sum(open_set.store.num_bytes for open_set in self._open_sets())

    @property
    def is_writable(self) -> bool:
        return self._first.is_writable

    def is_condemned(self) -> bool:
        return self._is_condemned or any(
            open_set.store.is_condemned() for open_set in self._open_sets()
        )

    def condemn(self) -> bool:
        """Read no row any more; sets that no other run writes are removed, for every process."""
        first = not self.is_condemned()
        self._is_condemned = True
        for open_set in self._open_sets():
            if open_set.lock(self._kept.run):
                open_set.store.condemn()
                if open_set.folder.exists():
                    self._kept.sets.discard(open_set.folder)
        return first

    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        """Return the (B,) depths at which rows are found, the deepest of each."""
        return self._find(ids, stamps, is_trusted=True)

    def find_unproven(self, ids: Tensor, stamps: Stamps) -> Tensor:
        """Return the depths at which there are rows that are not trusted yet."""
        return self._find(ids, stamps, is_trusted=False)

    def trust(self, stamp: int) -> None:
        """Read rows of a stamp, and write more, from now on."""
        self._trusted.add(stamp)

    def _find(self, ids: Tensor, stamps: Stamps, *, is_trusted: bool) -> Tensor:
        found = torch.zeros_like(ids)
        for depth in range(len(stamps), 0, -1):
            stamp = stamps[depth - 1]
            open_set = self._set_of(stamp)
            if open_set is None or (stamp in self._trusted) != is_trusted or bool(found.all()):
                continue
            here = open_set.store.find(ids, (stamp,)) > 0
            found = found.where((found > 0) | ~here, depth)
        return found

    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        """Read the deepest row of each sample; see `RowStore.read`."""
        found = self.find(ids, stamps)
        depths = [depth for depth in found.unique().tolist() if depth]
        deepest = max(depths, default=len(stamps))
        read = self._read_at(deepest, ids, stamps, out, pool)
        for depth in depths[-2::-1]:
            places = (found == depth).nonzero().flatten()
            part = self._read_at(depth, ids[places], stamps, None, pool)
            read.depth[places] = part.depth
            for name, row in part.rows.items():
                read.rows[name][places] = row
            read = RowRead(read.depth, read.rows, read.num_corrupt + part.num_corrupt)
        return read

    def clear(self, ids: Tensor) -> None:
        """Make rows of every depth empty: their sample is another one by now."""
        for open_set in self._open_sets():
            if open_set.is_writable:
                open_set.store.clear(ids)

    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        """Write rows into the set of a stamp, unless another run does."""
        open_set = self._set_to_write(stamp)
        if open_set is not None and self._may_write(open_set, stamp) and not self._is_condemned:
            open_set.store.write(ids, stamp, rows, lengths)

    def close(self) -> None:
        """Let go of all sets; their rows stay."""
        for open_set in self._open_sets():
            open_set.close()
        self._sets.clear()

    def _open_sets(self) -> list[OpenSet]:
        # A copy, as another thread may add one.
        return [open_set for open_set in list(self._sets.values()) if open_set is not None]

    def _may_write(self, open_set: OpenSet, stamp: int) -> bool:
        """Return whether no other run writes a set, and its rows are trusted."""
        if not open_set.is_writable and open_set.lock(self._kept.run):
            # Without rows there is nothing to prove: they will all be this run's.
            if not open_set.store.find(torch.arange(self.num_rows), (stamp,)).any():
                self.trust(stamp)
        return open_set.is_writable and stamp in self._trusted

    def _set_of(self, stamp: int) -> OpenSet | None:
        """Return the open set of a stamp; None where there is none, or it has other rows."""
        if stamp not in self._sets:
            self._sets[stamp] = self._opened(stamp, makes=False)
        return self._sets[stamp]

    def _set_to_write(self, stamp: int) -> OpenSet | None:
        """Return the set of a stamp; of layers that were edited it replaces the one before."""
        open_set = self._set_of(stamp)
        if open_set is not None or stamp == self._edited:
            return open_set
        if self._edited is not None and (before := self._sets.pop(self._edited)) is not None:
            before.close()
            with suppress(OSError):  # Somebody has removed it.
                self._kept.sets.remove(before.folder.name)
        self._edited, self._sets[stamp] = stamp, self._opened(stamp, makes=True)
        return self._sets[stamp]

    def _opened(self, stamp: int, *, makes: bool) -> OpenSet | None:
        kept, made_from = self._kept, self._kept.made_at(stamp)
        opened: OpenSet | None
        try:
            if makes:
                opened = kept.sets.obtain(made_from, self.layout, self.num_rows, kept.about)
            else:
                opened = kept.sets.find(made_from, self.layout)
        except OSError as error:
            _LOGGER.warning("rows are not %s: %s", "kept" if makes else "read", error)
            return None
        if opened is not None and opened.store.num_rows != self.num_rows:
            # A set with less room has its rows for other samples.
            opened.close()
            return None
        return opened

    def _read_at(
        self, depth: int, ids: Tensor, stamps: Stamps, out: Rows | None, pool: RowPool | None
    ) -> RowRead:
        open_set = self._set_of(stamps[depth - 1]) or self._first
        read = open_set.store.read(ids, stamps[depth - 1 : depth], out=out, pool=pool)
        return RowRead(read.depth * depth, read.rows, read.num_corrupt)

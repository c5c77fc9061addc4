"""Say what every store of rows does, wherever its rows lie.

All that a store knows of a row is its `RowLayout`: named tensors, where each begins, and which of
them may be shorter than their room. A row of other tensors is another layout, and no other store.

Up to three threads use a store:

    fetching       the one thread that asks for rows, and writes what it has computed
    reading ahead  reads, beside a step, the rows that are asked for next
    writing        of a `WriteBehind`: writes rows into the store within, and makes checks
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from autocache.layout import RowLayout
from autocache.row_pool import RowPool

Rows: TypeAlias = Mapping[str, Tensor]
"""Rows by field name, (B, *shape) each."""
Stamps: TypeAlias = Sequence[int]
"""The stamps of depths 1, 2, ...; none is 0."""
NewRows: TypeAlias = Mapping[str, Tensor | Callable[[], Tensor]]
"""Rows to write. A function gives its field on the thread that writes."""


@dataclass(frozen=True)
class RowRead:
    """Hold what one read found.

    Attributes:
        depth: (B,) int64; 0 for a miss, else 1 + the index into the stamps asked for.
        rows: by field name, (B, *shape) in the stored dtype, zeros behind a row's own length;
            undefined where depth is 0.
        num_corrupt: rows whose check failed.
    """

    depth: Tensor
    rows: dict[str, Tensor]
    num_corrupt: int

    def join(self, other: RowRead) -> RowRead:
        """Return both, this one's rows first, in new memory."""
        rows = {name: torch.cat((row, other.rows[name])) for name, row in self.rows.items()}
        corrupt = self.num_corrupt + other.num_corrupt
        return RowRead(torch.cat((self.depth, other.depth)), rows, corrupt)


class ActivationStore(ABC):
    """Keep rows of a layout by id, each under the stamp of the depth that it was computed to.

    Ids are (B,) int64 on the CPU. Ids beyond `num_rows` have no row: they miss, and are not
    written. Other ids raise a ValueError, and so does a stamp outside 0 < stamp < 2**64.

    Attributes:
        reads_ahead: whether a thread saves time by reading a step's rows in advance.
    """

    reads_ahead = True

    def __init__(self, layout: RowLayout, num_rows: int) -> None:
        self.layout, self.num_rows = layout, num_rows

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return what the store takes where its rows lie. Any thread may ask."""

    @property
    def is_writable(self) -> bool:
        """Return whether rows are kept that this process writes. Any thread may ask."""
        return True

    @abstractmethod
    def is_condemned(self) -> bool:
        """Return whether a check has failed, of any process. For the fetching thread."""

    @abstractmethod
    def condemn(self) -> bool:
        """Let no row be read any more; return whether this call was the first. For any thread."""

    def holds(self, check: Callable[[], bool]) -> bool:
        """Make a check that condemns the store where it fails; return whether it held.

        For the fetching thread. A store may make the check on another thread, and return True.
        """
        return check()

    @abstractmethod
    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        """Return the (B,) depths of undamaged rows, as `read`. For the fetching thread."""

    @abstractmethod
    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        """Read the rows that stand under one of these stamps.

        For the fetching thread, and beside it for the one that reads ahead.

        Rows are copied to `out`, tensors of `buffers`, for B rows or more: fresh memory costs as
        much as the copy. What these hold for rows that are not found stays there.

        Args:
            pool: copies rows, torch's threads never; None for the caller alone.
        """

    @abstractmethod
    def expect(self, ids: Tensor) -> None:
        """Have the system begin to read these rows from a disk. For the fetching thread."""

    @abstractmethod
    def warn_of_damage(self, read: RowRead) -> None:
        """Warn of the first damaged rows, once read. For the fetching thread."""

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        """Return memory for `read` to copy `num` rows into, pinned if asked. For any thread."""
        return {
            field.name: torch.empty(num, field.num_words, dtype=torch.int64, pin_memory=pinned)
            for field in self.layout.fields
        }

    @abstractmethod
    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        """Write rows, each id once; from now on they are found.

        For the fetching thread; the store within a `WriteBehind` is written to by its thread.

        Args:
            rows: every field of the layout and no other, any device.
            lengths: (B,) int64 on CPU, entries of each row's varying fields; None for all.
        Raises:
            ValueError: rows that do not match the layout.
        """

    @abstractmethod
    def clear(self, ids: Tensor) -> None:
        """Make rows empty: no stamp finds them. For the fetching thread."""

    @abstractmethod
    def settle(self) -> None:
        """Have all rows written, so that other processes find them. For the fetching thread."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the rows. For the fetching thread, once no other uses the store."""


class StoreProxy(ActivationStore):
    """Pass calls on to the store within, but those that every store over another changes."""

    def __init__(self, within: ActivationStore) -> None:
        super().__init__(within.layout, within.num_rows)
        self._within = within

    @property
    def num_bytes(self) -> int:
        return self._within.num_bytes

    @property
    def is_writable(self) -> bool:
        return self._within.is_writable

    def is_condemned(self) -> bool:
        return self._within.is_condemned()

    def condemn(self) -> bool:
        return self._within.condemn()

    def holds(self, check: Callable[[], bool]) -> bool:
        return self._within.holds(check)

    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        return self._within.find(ids, stamps)

    def expect(self, ids: Tensor) -> None:
        self._within.expect(ids)

    def warn_of_damage(self, read: RowRead) -> None:
        self._within.warn_of_damage(read)

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        return self._within.buffers(num, pinned=pinned)

    def clear(self, ids: Tensor) -> None:
        self._within.clear(ids)

    def settle(self) -> None:
        self._within.settle()

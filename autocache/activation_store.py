"""Say what the cache asks of a store of rows, wherever they lie.

RowStore       a file that the processes of a node share, or host memory
WrittenBehind  the same, written by a thread while the step computes
DeviceStore    activations on the device, the rest in one of the two
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from autocache.layout import RowLayout

FurtherRows: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""Gives further fields of rows, once they are written."""


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

    def joined(self, other: RowRead) -> RowRead:
        """Return both, this one's rows first, in memory of their own."""
        rows = {name: torch.cat((row, other.rows[name])) for name, row in self.rows.items()}
        corrupt = self.num_corrupt + other.num_corrupt
        return RowRead(torch.cat((self.depth, other.depth)), rows, corrupt)


class ActivationStore(Protocol):
    """Keep rows by sample id, each under the stamp of what it has passed through.

    Attributes:
        layout, num_rows: what a row holds, and ids 0..num_rows-1 have one.
        num_bytes: what it takes.
        reads_ahead: whether a thread saves time where it reads a step's rows in advance.
    """

    layout: RowLayout
    num_rows: int
    num_bytes: int
    reads_ahead: bool

    @property
    def is_condemned(self) -> bool:
        """Tell whether it was found, by any process, that the rows are of no use."""

    def condemn(self) -> bool:
        """Let nobody read a row any more; tell whether this call was the first."""

    def holds(self, check: Callable[[], bool]) -> bool:
        """Have a check made that condemns the store where it fails; False if it has failed.

        Where others do it meanwhile, True; `is_condemned` then waits for them.
        """

    def find(self, sample_ids: Tensor, depth_stamps: Sequence[int]) -> Tensor:
        """Return the (B,) depths that `read` would find rows at, unless they are damaged."""

    def read(
        self,
        sample_ids: Tensor,
        depth_stamps: Sequence[int],
        *,
        into: Mapping[str, Tensor] | None = None,
        in_background: bool = False,
    ) -> RowRead:
        """Read rows; see `RowStore.read`."""

    def warn_of_damage(self, read: RowRead) -> None:
        """Warn of damaged rows that were read, if they are the first."""

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        """Return memory for `read` to copy so many rows into."""

    def clear(self, sample_ids: Tensor) -> None:
        """Let the rows of a batch be found under no stamp."""

    def write(
        self,
        sample_ids: Tensor,
        stamp: int,
        rows: Mapping[str, Tensor],
        lengths: Tensor | None = None,
        *,
        also: FurtherRows | None = None,
    ) -> None:
        """Write rows; from now on they are found. See `RowStore.write`."""

    def settle(self) -> None:
        """Return when all that was written can be found by other processes."""

    def close(self) -> None:
        """Give the memory back."""

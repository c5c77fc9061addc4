"""Number the rows that a sample has in a batch: its pieces.

a batch of samples 0 and 1                columns    pieces of sample 1
a0 a1 │ b0 b1 │ label0 label1             a, b       a1, b1
chosen0 chosen1 rejected0 rejected1       one, of    chosen1, rejected1
chosen0 rejected0 chosen1 rejected1       two rows   chosen1, rejected1

A column is what one call of the model is given. The feed takes pieces for samples of one row: a
piece's index is `sample * number of pieces + piece`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Subset

from pipetransformer.feed import spread

_NUM_COMPARED = 5
"""Samples that are collated in pairs, both ways round."""


@final
@dataclass(frozen=True)
class SampleRows:
    """Say how many rows each sample has in an entry; blockwise, all first rows come first."""

    num: int = 1
    is_blockwise: bool = False

    def places(self, num_samples: int) -> Tensor:
        """Return (B, num) int64: where each sample's rows are."""
        places = torch.arange(num_samples * self.num)
        return places.view(self.num, -1).T if self.is_blockwise else places.view(-1, self.num)


@final
@dataclass(frozen=True)
class Pieces:
    """Number the pieces of samples, column by column, by each column's rows."""

    columns: tuple[SampleRows, ...] = (SampleRows(),)

    @property
    def column_rows(self) -> list[tuple[int, int]]:
        """Return each piece's column, and its row there."""
        return [(c, row) for c, one in enumerate(self.columns) for row in range(one.num)]

    @property
    def num(self) -> int:
        return len(self.column_rows)

    def ids(self, samples: Tensor, column: int) -> Tensor:
        """Return (R,) indices of samples' pieces, as an entry of the column has them."""
        if self.num == 1:
            return samples
        rows, first = self.columns[column], self.column_rows.index((column, 0))
        numbers = samples[:, None] * self.num + torch.arange(first, first + rows.num)
        return numbers.flatten()[rows.places(len(samples)).flatten().argsort()]

    def column_of(self, rows: SampleRows) -> int | None:
        """Return a column whose pieces can hold an entry that the model is not given."""
        if rows.num == 1:
            return 0
        return self.columns.index(rows) if rows in self.columns else None


def in_pieces(dataset: Any, num: int) -> Any:
    """Return a data set that gives each sample once for each of its pieces."""
    # A Subset, as that is looked through for labels.
    repeated = [index for index in range(len(dataset)) for _ in range(num)]
    return Subset(dataset, repeated) if num > 1 else dataset


def order_of_rows(
    collate: Callable[[list[Any]], Mapping[str, Any]], dataset: Any, nums: Mapping[str, int]
) -> dict[str, SampleRows]:
    """Find the order of entries with several rows a sample: two samples change places.

    Args:
        collate: returns all that a batch has, by name.
        nums: the entries' rows a sample, of one sample that was repeated.
    """
    possible = {n: {SampleRows(num, one) for one in (True, False)} for n, num in nums.items()}
    chosen = spread(len(dataset), _NUM_COMPARED)
    for pair in zip(chosen[:-1], chosen[1:], strict=True):
        items = [dataset[index] for index in pair]
        batch, turned = collate(items), collate(items[::-1])
        for name, orders in possible.items():
            ours, others = batch.get(name), turned.get(name)
            orders -= {one for one in orders if not _is_turned(ours, others, one)}
    # What is the same in all samples, such as a mask without zeros, lies as the others do.
    told = {one for orders in possible.values() if len(orders) == 1 for one in orders}
    known = {n: orders if len(orders) == 1 else orders & told for n, orders in possible.items()}
    return {name: one for name, orders in known.items() if len(orders) == 1 for one in orders}


def _is_turned(ours: Any, others: Any, rows: SampleRows) -> bool:
    """Return whether two samples have the same rows as where they change places."""
    if not all(isinstance(one, Tensor) and len(one) == 2 * rows.num for one in (ours, others)):
        return False
    places = rows.places(2)
    return torch.equal(ours[places], others[places.flip(0)])

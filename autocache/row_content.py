"""Say what a row of the cache holds, and take it from a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from autocache.digests import add_entry
from autocache.layout import RowField, RowLayout
from autocache.unequal_lengths import Positions, by_position, own_lengths

HIDDEN, DIGEST = "hidden", "digest"

Changed: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class RowContent:
    """Say what a row holds beside the hidden states, and how.

    Args:
        keep: the dataset's entries that later stages need (attention mask, targets). Without a
            store, those of them that it gives.
        dtype: the hidden states' as they are stored; None as they are computed. In a smaller one
            samples have rounded activations, the same in every epoch, stored or not. It is for
            hidden states of floating point.
        padding_mask: a kept entry, (S,) a sample, whose zeros at the end say which of the (S, ...)
            hidden states nothing depends on: they are not stored, and read as zeros. Where these
            have other dimensions, or None is given, all count.
        computed_dtype: the hidden states' as the layers compute them; None where that is `dtype`.
        checked: whether to store a digest of the sample, too, and so check the dataset against it.
        checks_every: whether every row that is read is checked, and not some.
        positions: where samples are padded to another length in every batch; rows then have room
            for the longest, and the hidden states count to its names.
        changed: a function of (B,) ids and their rows' kept entries that returns (B,) bool: of
            which samples the dataset is known, without asking it for them, to give other entries
            by now. Those rows are not used.
    Raises:
        ValueError: `keep` names "hidden" or an entry twice, or lacks the mask.
    """

    keep: tuple[str, ...]
    dtype: torch.dtype | None = None
    computed_dtype: torch.dtype | None = None
    padding_mask: str | None = None
    checked: bool = True
    checks_every: bool = False
    positions: Positions | None = None
    changed: Changed | None = None

    def __post_init__(self) -> None:
        if len({HIDDEN, DIGEST, *self.keep}) < 2 + len(self.keep):
            raise ValueError(
                f'keep is {self.keep}; name each entry once, and none "{HIDDEN}" or "{DIGEST}"'
            )
        if self.padding_mask is not None and self.padding_mask not in self.keep:
            raise ValueError(f"keep = {self.keep} lacks the padding mask {self.padding_mask!r}")

    def layout(self, batch_of_one: Mapping[str, Tensor], hidden_of_one: Tensor) -> RowLayout:
        """Lay out the rows of a store from one sample.

        Args:
            batch_of_one: the dataset's entries of one sample, (1, ...) each.
            hidden_of_one: (1, ...) hidden states, in the dtype the layers compute.
        Raises:
            ValueError: an entry to keep is not in the batch.
        """
        check_kept(batch_of_one, self.keep)
        mask = self.padding_mask
        varies = mask is not None and by_position(hidden_of_one, batch_of_one[mask].shape[1])
        fields = [
            RowField(
                HIDDEN, tuple(hidden_of_one.shape[1:]), self.dtype or hidden_of_one.dtype, varies
            )
        ]
        kept = {name: batch_of_one[name] for name in self.keep}
        if self.checked:
            kept[DIGEST] = self.digests(batch_of_one)
        fields += [RowField(name, tuple(t.shape[1:]), t.dtype) for name, t in kept.items()]
        return RowLayout(tuple(fields))

    def lengths(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the (N,) hidden states of each sample that are stored; None for all."""
        return None if self.padding_mask is None else own_lengths(batch[self.padding_mask])

    def digests(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (N,) int64: a digest of all that the dataset gave for each of (N, ...) samples.

        Padding does not enter it where that depends on the batch.
        """
        positions, num = self.positions, len(next(iter(batch.values())))
        digests = np.zeros(num, np.uint64)
        own = None if positions is None else own_lengths(batch[positions.mask])
        for name in sorted(batch):
            is_cut = positions is not None and name in positions.names
            digests = add_entry(digests, name, batch[name], own if is_cut else None)
        return torch.from_numpy(digests.view(np.int64))

    def brought_together(
        self, found: Tensor, rows: dict[str, Tensor], loaded: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Give what was read and what was loaded as many positions as the longest needs.

        Args:
            found: (B,) depths at which the rows were found, 0 for those that are loaded.
            rows, loaded: (B, ...) and (N, ...) each; {} for none.
        """
        positions = self.positions
        if positions is None:
            return rows, loaded
        num = loaded[positions.mask].shape[1] if loaded and bool((found == 0).any()) else 1
        if rows:
            num = max(num, int(own_lengths(rows[positions.mask][found > 0]).max()))
        return positions.bring(rows, num), positions.bring(loaded, num)

    def first(self, rows: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
        """Return so many of a batch's rows, without positions that only the others need."""
        first = {name: row[:num] for name, row in rows.items()}
        if len(rows[HIDDEN]) == num or self.positions is None:
            return first
        return self.positions.bring(first, int(own_lengths(first[self.positions.mask]).max()))


def check_kept(batch: Mapping[str, Tensor], keep: tuple[str, ...]) -> None:
    if missing := [name for name in keep if name not in batch]:
        raise ValueError(
            f"the dataset gives {sorted(batch)}, without {missing} of keep = {keep}; "
            "keep only names the dataset gives"
        )

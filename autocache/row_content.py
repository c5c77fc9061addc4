"""Say what a row of the cache holds, and take it from a sample.

Samples of unequal lengths are padded to the longest of a batch; rows have room for the longest of
all, and are cut to the longest of a step::

    rows of the store     a step's samples
    a a a . . . . .       a a a .
    b b b b . . . .       b b b b
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from autocache.digests import add_entry
from autocache.int8_tokens import pack, takes_tokens, unpack
from autocache.layout import RowField, RowLayout

HIDDEN, DIGEST = "hidden", "digest"

Changed: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Positions:
    """Say which entries have a value for each position of a sample.

    Args:
        mask: the entry whose zeros at a sample's end are padding, (N, S).
        names: entries, (N, S, ...), with as many positions as the mask; the mask is one of them.
        most: positions of the longest sample.
        padding: what entries are padded with; 0 for those not named.
    """

    mask: str
    names: tuple[str, ...]
    most: int
    padding: Mapping[str, float] = field(default_factory=dict)

    def resize(self, batch: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
        """Return a batch cut, or padded, to `num` positions."""
        return {
            name: _with_positions(entry, num, self.padding.get(name, 0))
            if name in self.names
            else entry
            for name, entry in batch.items()
        }


def own_lengths(mask: Tensor) -> Tensor:
    """Return the (N,) positions up to each sample's last that is no padding, on the CPU.

    The mask, (N, S), is zero at padding. Where all is padding all S count: a model reads some.
    """
    counts = mask.cpu().reshape(len(mask), -1) != 0
    lengths = (counts * torch.arange(1, counts.shape[1] + 1)).amax(dim=1)
    return lengths.where(lengths > 0, counts.shape[1])


def by_position(hidden: Tensor, num: int) -> bool:
    """Return whether hidden states are (N, S, ...) with S = `num`, not pooled or prefixed."""
    return hidden.ndim > 2 and hidden.shape[1] == num


def _with_positions(entry: Tensor, num: int, padding: float) -> Tensor:
    missing = num - entry.shape[1]
    if missing <= 0:
        # Contiguous: kernels may sum in another order over what is not.
        return entry[:, :num].contiguous()
    behind = (0, 0) * (entry.ndim - 2) + (0, missing)
    return pad(entry, behind, value=padding)


@dataclass(frozen=True)
class RowContent:
    """Say what a row holds beside the hidden states, and how.

    Args:
        keep: the dataset's entries that later stages need (attention mask, targets). Without a
            store, entries that the dataset does not give are left out.
        dtype: in which hidden states are stored; None as computed. With a smaller one samples have
            rounded activations, the same in every epoch, stored or not. For floating point only;
            int8 has one scale a token, see `int8_tokens`.
        padding_mask: a kept entry, (S,) a sample, whose zeros at the end mark (S, ...) hidden
            states that nothing depends on: they are not stored, and read as zeros. Hidden states
            of other dimensions all count.
        computed_dtype: in which layers compute hidden states; None where that is `dtype`.
        checked: whether a row holds a digest of its sample, to check the dataset against.
        checks_every: whether every row that is read is checked, instead of some.
        positions: for samples that are padded to another length in every batch; rows then have
            room for the longest, and its names include the hidden states.
        changed: a function of (B,) ids and their rows' kept entries. It returns (B,) bool: for
            which samples the dataset is known to give other entries by now. Their rows are unused.
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
            ValueError: an entry to keep is not in the batch, or the dtype is int8 and there are no
                tokens.
        """
        check_kept(batch_of_one, self.keep)
        if self.dtype is torch.int8 and not takes_tokens(hidden_of_one):
            raise ValueError(
                "int8 has one scale for each token of floating-point hidden states, and a sample "
                f"has {hidden_of_one.dtype} of shape {tuple(hidden_of_one.shape[1:])}; store them "
                "in bfloat16, or as they are computed"
            )
        mask = self.padding_mask
        varies = mask is not None and by_position(hidden_of_one, batch_of_one[mask].shape[1])
        stored = self.encode(hidden_of_one)
        hidden = RowField(HIDDEN, tuple(stored.shape[1:]), stored.dtype, varies)
        kept = {name: batch_of_one[name] for name in self.keep}
        if self.checked:
            kept[DIGEST] = self.digests(batch_of_one)
        others = (RowField(name, tuple(t.shape[1:]), t.dtype) for name, t in kept.items())
        return RowLayout((hidden, *others))

    def lengths(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the (N,) hidden states of each sample that are stored; None for all."""
        return None if self.padding_mask is None else own_lengths(batch[self.padding_mask])

    def encode(self, hidden: Tensor) -> Tensor:
        """Return computed hidden states as a row holds them."""
        if self.dtype is torch.int8:
            return pack(hidden) if takes_tokens(hidden) else hidden
        is_kept = self.dtype is None or not hidden.is_floating_point()
        return hidden if is_kept else hidden.to(self.dtype)

    def decode(self, stored: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return hidden states from what a row holds, in a dtype; None is the computed one.

        A sample that misses gets what its row will give. It is rounded once: to round what a row
        gives again may give other bits.
        """
        dtype = dtype or self.computed_dtype
        is_whole = dtype is not None and not dtype.is_floating_point
        if self.dtype is stored.dtype is torch.int8 and not is_whole:
            stored = unpack(stored)
        return stored if dtype is None else stored.to(dtype)

    def digests(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (N,) int64: a digest of all that the dataset gave for each of N samples.

        Padding does not enter it where that depends on the batch.
        """
        positions, num = self.positions, len(next(iter(batch.values())))
        digests = np.zeros(num, np.uint64)
        lengths = None if positions is None else own_lengths(batch[positions.mask])
        for name in sorted(batch):
            is_cut = positions is not None and name in positions.names
            digests = add_entry(digests, name, batch[name], lengths if is_cut else None)
        return torch.from_numpy(digests.view(np.int64))

    def align(
        self, found: Tensor, rows: dict[str, Tensor], loaded: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Give rows, found at (B,) depths, and loaded samples as many positions as they need."""
        positions = self.positions
        if positions is None:
            return rows, loaded
        num = loaded[positions.mask].shape[1] if loaded and bool((found == 0).any()) else 1
        if rows:
            # Where nothing was found, a row is whatever lay in that memory.
            num = max(num, int(own_lengths(rows[positions.mask][found > 0]).max()))
        return positions.resize(rows, num), positions.resize(loaded, num)

    def head(self, rows: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
        """Return the first `num` of a batch's rows, without positions that only others need."""
        first = {name: row[:num] for name, row in rows.items()}
        if len(rows[HIDDEN]) == num or self.positions is None:
            return first
        return self.positions.resize(first, int(own_lengths(first[self.positions.mask]).max()))


def check_kept(batch: Mapping[str, Tensor], keep: tuple[str, ...]) -> None:
    if missing := [name for name in keep if name not in batch]:
        raise ValueError(
            f"the dataset gives {sorted(batch)}, without {missing} of keep = {keep}; "
            "keep only names the dataset gives"
        )

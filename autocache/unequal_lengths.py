"""Bring samples of unequal lengths to one: cut what is padding, or add some.

rows of the store     a step's samples
a a a . . . . .       a a a .           positions of the longest sample of the step,
b b b b . . . .       b b b b           whatever the longest of all has
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Positions:
    """Say what samples have one value of for each of their positions.

    Args:
        mask: the entry whose zeros at a sample's end mark what is padding, (N, S).
        names: entries, (N, S, ...), with as many positions as the mask; the mask is one of them.
        most: positions of the longest sample.
        padding: what entries are padded with; 0 where nothing is said.
    """

    mask: str
    names: tuple[str, ...]
    most: int
    padding: Mapping[str, float] = field(default_factory=dict)

    def bring(self, batch: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
        """Return a batch in which so many positions are left, or added."""
        return {
            name: _with_positions(entry, num, self.padding.get(name, 0))
            if name in self.names
            else entry
            for name, entry in batch.items()
        }


def own_lengths(mask: Tensor) -> Tensor:
    """Return the (N,) positions up to each sample's last that is no padding, on the CPU.

    Args:
        mask: (N, S), zero where there is padding. Where it is nothing but that, all S count: a
            model still reads some.
    """
    counts = mask.cpu().reshape(len(mask), -1) != 0
    lengths = (counts * torch.arange(1, counts.shape[1] + 1)).amax(dim=1)
    return lengths.where(lengths > 0, counts.shape[1])


def by_position(hidden: Tensor, num: int) -> bool:
    """Tell whether hidden states are (N, S, ...) of so many positions S.

    They are not where a layer pools positions, or puts a token of its own before them.
    """
    return hidden.ndim > 2 and hidden.shape[1] == num


def _with_positions(entry: Tensor, num: int, padding: float) -> Tensor:
    missing = num - entry.shape[1]
    if missing <= 0:
        # Contiguous: kernels may sum in another order over what is not.
        return entry[:, :num].contiguous()
    behind = (0, 0) * (entry.ndim - 2) + (0, missing)
    return pad(entry, behind, value=padding)

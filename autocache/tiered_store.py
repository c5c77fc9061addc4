"""Keep rows in several stores, the fastest first: a GPU's memory, then files.

row       0   1   2   3   4   5
GPU           0           1         two rows of six
file      0       1   2       3     the other four

A row belongs to one tier for good, by its number. A tier's rows are spread evenly over all: so
each tier has short and long samples, and every view, as each batch has rows of every tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import ActivationStore, NewRows, RowRead, Rows, Stamps
from autocache.prefix_chunks import select
from autocache.row_pool import RowPool
from autocache.uploads import send_like


@dataclass(frozen=True)
class TierPart:
    """Say which rows of a batch belong to a tier.

    Attributes:
        tier: its number.
        positions: (N,) int64, in the batch.
        ids: (N,) int64, the rows' numbers in the tier.
    """

    tier: int
    positions: Tensor
    ids: Tensor


@final
class TieredStore(ActivationStore):
    """Keep each row in one of several stores, which it owns; the first hold the first read.

    Args:
        tiers: by the name of their place, rows of one layout each. Those that other processes
            share come last.
    Attributes:
        has_device: whether a tier lies on a device.
    Raises:
        ValueError: there is no tier, or the tiers' layouts differ.
    """

    def __init__(self, tiers: Mapping[str, ActivationStore]) -> None:
        self.places, self.tiers = tuple(tiers), tuple(tiers.values())
        layouts = {tier.layout for tier in self.tiers}
        if len(layouts) != 1:
            raise ValueError(f"tiers have the layouts {layouts}; give tiers of one layout")
        super().__init__(self.tiers[0].layout, sum(tier.num_rows for tier in self.tiers))
        self.reads_ahead = any(tier.reads_ahead for tier in self.tiers)
        self.has_device = not all(tier.reads_ahead for tier in self.tiers)

    def parts(self, ids: Tensor) -> list[TierPart]:
        """Return the tiers that a batch has rows in, the first for a batch without rows.

        Ids without a row belong to the last tier, where they have none either.
        """
        parts, rest, positions, num_left = [], ids, torch.arange(len(ids)), self.num_rows
        for number, tier in enumerate(self.tiers[:-1]):
            slots, is_own = spread_rows(rest, tier.num_rows, num_left)
            is_own &= rest < num_left
            own, others = is_own.nonzero().flatten(), (~is_own).nonzero().flatten()
            parts.append(TierPart(number, positions[own], slots[own]))
            rest, positions = (rest - slots)[others], positions[others]
            num_left -= tier.num_rows
        parts.append(TierPart(len(parts), positions, rest))
        return [part for part in parts if len(part.ids)] or parts[:1]

    @property
    def num_bytes(self) -> int:
        return sum(tier.num_bytes for tier in self.tiers)

    @property
    def is_writable(self) -> bool:
        return all(tier.is_writable for tier in self.tiers)

    def is_condemned(self) -> bool:
        # All are asked, as each may have a check under way.
        condemned = [tier.is_condemned() for tier in self.tiers]
        if any(condemned) and not all(condemned):
            self.condemn()
        return any(condemned)

    def condemn(self) -> bool:
        # The last is the one that processes share: it says which of them was the first.
        return [tier.condemn() for tier in reversed(self.tiers)][0]

    def holds(self, check: Callable[[], bool]) -> bool:
        return self.tiers[-1].holds(check)

    def find(self, ids: Tensor, stamps: Stamps) -> Tensor:
        depth = torch.empty_like(ids)
        for part in self.parts(ids):
            depth[part.positions] = self.tiers[part.tier].find(part.ids, stamps)
        return depth

    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        """Read rows; where a tier lies on a device, "hidden" is there, all in new memory."""
        parts = self.parts(ids)
        if len(parts) == 1 or self.has_device:
            out = out if len(parts) == 1 else None
            reads = [
                self.tiers[part.tier].read(part.ids, stamps, out=out, pool=pool) for part in parts
            ]
            return join_reads(parts, reads)
        out = self.buffers(len(ids)) if out is None else out
        depth, num_corrupt = torch.zeros_like(ids), 0
        for part in parts:
            # The others have no row here, so what other tiers read of them stays.
            tier = self.tiers[part.tier]
            own = torch.full_like(ids, tier.num_rows).index_copy_(0, part.positions, part.ids)
            read = tier.read(own, stamps, out=out, pool=pool)
            depth, num_corrupt = depth + read.depth, num_corrupt + read.num_corrupt
        return RowRead(depth, read.rows, num_corrupt)

    def expect(self, ids: Tensor) -> None:
        for part in self.parts(ids):
            self.tiers[part.tier].expect(part.ids)

    def warn_of_damage(self, read: RowRead) -> None:
        self.tiers[-1].warn_of_damage(read)

    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        parts = self.parts(ids)
        if len(parts) == 1:
            self.tiers[parts[0].tier].write(parts[0].ids, stamp, rows, lengths)
            return
        shared = {n: row if isinstance(row, Tensor) else _once(row) for n, row in rows.items()}
        for part in parts:
            at = part.positions
            own = {name: _row_at(row, at) for name, row in shared.items()}
            own_lengths = None if lengths is None else lengths[at]
            self.tiers[part.tier].write(part.ids, stamp, own, own_lengths)

    def clear(self, ids: Tensor) -> None:
        for part in self.parts(ids):
            self.tiers[part.tier].clear(part.ids)

    def settle(self) -> None:
        for tier in self.tiers:
            tier.settle()

    def close(self) -> None:
        with ExitStack() as closing:  # One that raises leaves none open.
            for tier in self.tiers:
                closing.callback(tier.close)


def spread_rows(ids: Tensor, num_rows: int, num_all: int) -> tuple[Tensor, Tensor]:
    """Return which row each of (B,) samples has, of rows spread evenly over all samples.

    Returns:
        (B,) rows, and (B,) bool: whether a sample has one, as its share of all rows reaches the
        next whole number.
    """
    rows = ids * num_rows // num_all
    return rows, (ids + 1) * num_rows // num_all > rows


def join_reads(parts: Sequence[TierPart], reads: Sequence[RowRead]) -> RowRead:
    """Return what was read of each part as one, in the batch's order, on the first's device."""
    if len(parts) == 1:
        return reads[0]
    order, sizes = torch.cat([part.positions for part in parts]), [len(part.ids) for part in parts]

    def join(values: Sequence[Tensor]) -> Tensor:
        whole = values[0].new_empty(len(order), *values[0].shape[1:])
        # Sent at once, as a GPU waits longer for a small copy than for the bytes in it.
        for positions, value in zip(send_like(order, whole).split(sizes), values, strict=True):
            on_device = value if value.device == whole.device else send_like(value, whole)
            whole.index_copy_(0, positions, on_device)
        return whole

    rows = {name: join([read.rows[name] for read in reads]) for name in reads[0].rows}
    num_corrupt = sum(read.num_corrupt for read in reads)
    return RowRead(join([read.depth for read in reads]), rows, num_corrupt)


def _row_at(
    row: Tensor | Callable[[], Tensor], positions: Tensor
) -> Tensor | Callable[[], Tensor]:
    """Return a tier's part of a field."""
    return select(row, positions) if isinstance(row, Tensor) else lambda: select(row(), positions)


def _once(give: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Have the threads of several tiers share what a function computes."""
    lock, computed = threading.Lock(), list[Tensor]()

    def shared() -> Tensor:
        with lock:
            if not computed:
                computed.append(give())
        return computed[0]

    return shared

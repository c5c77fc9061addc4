"""Keep activations in a GPU's memory, where a step reads them with one operation.

device   hidden of row 0 | hidden of row 1 | ...         one tensor
host     stamp, check, kept entries, digest | ...        a store of its own, see `RowStore`

A process that reads some of the rows alone has fewer slots than there are rows. A row takes a slot
when it is first written, and keeps it; where all are taken, it is not kept::

    row      0   1   2   3   4   5
    slot     1           2   0          written in the order 4, 0, 3

A row is valid if the host's part is. All operations on the tensor run on the current stream, in
the order they are launched. So a reader finds what was launched before it, and nothing waits. Only
this process can read it.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from autocache.activation_store import NewRows, RowRead, Rows, Stamps, StoreProxy
from autocache.layout import RowLayout
from autocache.row_content import HIDDEN
from autocache.row_pool import RowPool
from autocache.store import RowStore
from autocache.uploads import send_like
from autocache.write_behind import WriteBehind


@final
class DeviceStore(StoreProxy):
    """Store rows of a layout whose "hidden" lies on a device.

    Attributes:
        num_slots: most rows that are kept; by default all.
    Raises:
        ValueError: the layout has no "hidden", or nothing beside it; there are no rows.
        torch.OutOfMemoryError: the device has too little memory; none is taken then.
    """

    reads_ahead = False

    def __init__(
        self,
        layout: RowLayout,
        num_rows: int,
        *,
        device: torch.device,
        num_slots: int | None = None,
    ) -> None:
        fields = {field.name: field for field in layout.fields}
        if HIDDEN not in fields or len(fields) < 2:
            raise ValueError(
                f'the layout has fields {[*fields]}; give "{HIDDEN}" and at least one other, such '
                "as the digest"
            )
        self._field = fields.pop(HIDDEN)
        rest = RowStore.in_memory(RowLayout(tuple(fields.values())), num_rows)
        # A digest takes long beside a GPU's step, so a thread computes it.
        super().__init__(WriteBehind(rest, device=device) if device.type == "cuda" else rest)
        self.layout, self.num_slots = layout, num_rows if num_slots is None else num_slots
        # By row, -1 for none. The last entry is that of ids without a row.
        self._slots, self._num_taken = torch.full((num_rows + 1,), -1), 0
        self._is_full = False
        try:
            shape = (self.num_slots, *self._field.shape)
            self._hidden = torch.empty(shape, dtype=self._field.dtype, device=device)
        except BaseException:
            self._within.close()
            raise

    @property
    def num_bytes(self) -> int:
        return device_bytes(self.layout, self.num_slots) + self._within.num_bytes

    @property
    def is_writable(self) -> bool:
        return not self._is_full and super().is_writable

    def read(
        self, ids: Tensor, stamps: Stamps, *, out: Rows | None = None, pool: RowPool | None = None
    ) -> RowRead:
        """Read rows; "hidden" is on the device, in new memory."""
        read = self._within.read(ids, stamps, out=out, pool=pool)
        # Misses take slot 0, so that one operation reads all.
        index = self._slots_of(ids).where(read.depth > 0, 0)
        hidden = self._hidden.index_select(0, send_like(index, self._hidden))
        return RowRead(read.depth, {HIDDEN: hidden, **read.rows}, read.num_corrupt)

    def expect(self, ids: Tensor) -> None:
        """Return at once: rows are in memory."""

    def write(self, ids: Tensor, stamp: int, rows: NewRows, lengths: Tensor | None = None) -> None:
        """Write rows; "hidden" is given on the device."""
        rest = {name: row for name, row in rows.items() if name != HIDDEN}
        hidden = {n: r for n, r in rows.items() if n == HIDDEN and isinstance(r, Tensor)}
        RowLayout((self._field,)).check(hidden, len(ids))
        values, index = hidden[HIDDEN].detach(), self._take_slots(ids)
        if self._field.varies and lengths is not None:
            values = _zeros_behind(values, lengths)
        has_slot = index >= 0
        if not has_slot.all():
            values = values[send_like(has_slot.nonzero().flatten(), values)]
            index = index[has_slot]
        # Cleared first: until the new stamp is there, no stamp stands for what the row holds.
        self._within.clear(ids)
        self._hidden.index_copy_(0, send_like(index, self._hidden), values)
        self._within.write(ids.where(has_slot, self.num_rows), stamp, rest)

    def _slots_of(self, ids: Tensor) -> Tensor:
        return self._slots[ids.clamp(max=self.num_rows)]

    def _take_slots(self, ids: Tensor) -> Tensor:
        """Return rows' slots, those of new rows included; -1 for none."""
        slots = self._slots_of(ids)
        new = ids[(slots < 0) & (ids < self.num_rows)]
        num = min(len(new), self.num_slots - self._num_taken)
        if len(new):
            self._slots[new[:num]] = torch.arange(self._num_taken, self._num_taken + num)
            self._num_taken += num
            self._is_full = num < len(new)
        return self._slots_of(ids)

    def close(self) -> None:
        self._hidden = self._hidden.new_empty(0)
        self._within.close()


def device_bytes(layout: RowLayout, num_rows: int) -> int:
    """Return what a `DeviceStore` takes on its device."""
    return num_rows * sum(field.num_bytes for field in layout.fields if field.name == HIDDEN)


def _zeros_behind(values: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, S, ...) values that are zero behind each sample's length."""
    is_behind = torch.arange(values.shape[1]) >= lengths[:, None]
    is_behind = is_behind.view(*is_behind.shape, *(1 for _ in values.shape[2:]))
    return values.masked_fill(send_like(is_behind, values), 0)

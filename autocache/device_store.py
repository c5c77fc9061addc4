"""Keep activations in a GPU's memory, where a step reads them with one operation.

device   hidden of row 0 | hidden of row 1 | ...         one tensor
host     stamp, check, kept entries, digest | ...        a store of its own, see `RowStore`

A row is valid if the host's part is. All operations on the tensor are on the current stream, one
after the other as they are launched: who reads a row finds what was launched before, and nothing
waits. Only this process can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from autocache.activation_store import FurtherRows, RowRead
from autocache.behind import WrittenBehind
from autocache.layout import RowLayout
from autocache.row_content import HIDDEN
from autocache.store import RowStore, check_rows
from autocache.uploads import beside


@final
class DeviceStore:
    """Store rows of a layout whose "hidden" lies on a device.

    Args:
        layout: with "hidden" and at least one other field.
        num_rows: ids 0..num_rows-1 have a row.
    Raises:
        ValueError: the layout has no "hidden", or nothing beside it; there are no rows.
        torch.OutOfMemoryError: the device has too little memory; none is taken then.
    """

    reads_ahead = False

    def __init__(self, layout: RowLayout, num_rows: int, *, device: torch.device) -> None:
        fields = {field.name: field for field in layout.fields}
        if HIDDEN not in fields or len(fields) < 2:
            raise ValueError(
                f'the layout has fields {[*fields]}; give "{HIDDEN}" and at least one other, such '
                "as the digest"
            )
        self._field = fields.pop(HIDDEN)
        rest = RowStore.in_memory(RowLayout(tuple(fields.values())), num_rows)
        # Digests take long beside a GPU's step.
        is_behind = device.type == "cuda"
        self._rest = WrittenBehind(rest, device=device) if is_behind else rest
        self.layout, self.num_rows = layout, num_rows
        try:
            shape = (num_rows, *self._field.shape)
            self._hidden = torch.empty(shape, dtype=self._field.dtype, device=device)
        except BaseException:
            self._rest.close()
            raise
        self.num_bytes = device_bytes(layout, num_rows) + rest.num_bytes

    @property
    def is_condemned(self) -> bool:
        return self._rest.is_condemned

    def condemn(self) -> bool:
        return self._rest.condemn()

    def holds(self, check: Callable[[], bool]) -> bool:
        return self._rest.holds(check)

    def find(self, sample_ids: Tensor, depth_stamps: Sequence[int]) -> Tensor:
        return self._rest.find(sample_ids, depth_stamps)

    def read(
        self,
        sample_ids: Tensor,
        depth_stamps: Sequence[int],
        *,
        into: Mapping[str, Tensor] | None = None,
        in_background: bool = False,
    ) -> RowRead:
        """Read rows, as `RowStore.read`; "hidden" is on the device, in memory of its own."""
        read = self._rest.read(sample_ids, depth_stamps, into=into, in_background=in_background)
        index = sample_ids.where(read.depth > 0, 0)
        hidden = self._hidden.index_select(0, beside(index, self._hidden))
        return RowRead(read.depth, {HIDDEN: hidden, **read.rows}, read.num_corrupt)

    def warn_of_damage(self, read: RowRead) -> None:
        self._rest.warn_of_damage(read)

    def buffers(self, num: int, *, pinned: bool = False) -> dict[str, Tensor]:
        return self._rest.buffers(num, pinned=pinned)

    def clear(self, sample_ids: Tensor) -> None:
        self._rest.clear(sample_ids)

    def write(
        self,
        sample_ids: Tensor,
        stamp: int,
        rows: Mapping[str, Tensor],
        lengths: Tensor | None = None,
        *,
        also: FurtherRows | None = None,
    ) -> None:
        """Write rows, as `RowStore.write`; "hidden" is given on the device."""
        rest = {name: row for name, row in rows.items() if name != HIDDEN}
        hidden = {name: row.detach() for name, row in rows.items() if name == HIDDEN}
        check_rows(RowLayout((self._field,)), hidden, len(sample_ids))
        values, has_row = hidden[HIDDEN], sample_ids < self.num_rows
        if self._field.varies and lengths is not None:
            values = _zeros_behind(values, lengths)
        ids = sample_ids
        if not has_row.all():
            values = values[beside(has_row.nonzero().flatten(), values)]
            ids = sample_ids[has_row]
        # Before the activations: until the stamp is there, the row holds what no stamp says.
        self._rest.clear(sample_ids)
        self._hidden.index_copy_(0, beside(ids, self._hidden), values)
        self._rest.write(sample_ids, stamp, rest, also=also)

    def settle(self) -> None:
        self._rest.settle()

    def close(self) -> None:
        """Give the memory back, on the device, too."""
        self._hidden = self._hidden.new_empty(0)
        self._rest.close()


def device_bytes(layout: RowLayout, num_rows: int) -> int:
    """Return what a `DeviceStore` takes on its device."""
    return num_rows * sum(field.num_bytes for field in layout.fields if field.name == HIDDEN)


def _zeros_behind(values: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, S, ...) values that are zero behind each sample's length."""
    is_behind = torch.arange(values.shape[1]) >= lengths[:, None]
    is_behind = is_behind.view(*is_behind.shape, *(1 for _ in values.shape[2:]))
    return values.masked_fill(beside(is_behind, values), 0)

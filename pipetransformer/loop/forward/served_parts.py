"""Give a model's parts their rows in a forward, in the order in which it calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipetransformer.checks import differ
from pipetransformer.loop.forward.model_watch import InnerHooks
from pipetransformer.loop.forward.partial_forward import autocast_dtype
from pipetransformer.model import PartCall, Task, beside_parts, row_of


@final
class ServedParts:
    """Know which parts have had their rows in a forward, and that these are what they return.

    Where rows are of blocks, there are none.

    Attributes:
        names: of the parts.
        is_proving: whether parts run in this forward, and are compared with their rows.
    """

    def __init__(self, task: Task) -> None:
        row, model = row_of(task.model), task.model
        packing, self._model = row.packing, model.model
        parts = () if packing is None else row.blocks
        self.names = () if packing is None else packing.names
        self._calls: Sequence[PartCall] = () if packing is None else row.calls
        self._inner = [InnerHooks(part) for part in parts]
        sides = model.sides_of(0, len(model.sublayers))
        if parts and (row.idle or {*model.inputs} - {*sides}):
            # What lies below is given nothing that a hook could read, where rows serve.
            below = nn.ModuleList(beside_parts(row.called_below, parts))
            self._inner.append(InnerHooks(below))
        self._answered = set[int]()
        # Parts whose rows are what they return where the forward is given lists of targets.
        self._proven = set[int]()
        self.is_proving = False

    def begin(self, *, has_lists: bool) -> None:
        """Begin with a forward.

        Args:
            has_lists: whether it is given lists of targets.
        """
        self._answered.clear()
        self.is_proving = has_lists and len(self._proven) < len(self.names)

    @property
    def left_out(self) -> str:
        """Name a part that the forward has not called; "" without one."""
        return next((n for i, n in enumerate(self.names) if i not in self._answered), "")

    def miss_hooks(self) -> bool:
        """Return whether somebody would miss a call of a hook within the parts."""
        return any(hooks.missed_at() for hooks in self._inner)

    def answer(
        self, index: int, rows: Tensor, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what a part returns, from rows, in the place of running it."""
        name, call = self.names[index], self._calls[index]
        if index in self._answered:
            raise ValueError(
                f"this forward calls {name!r} twice, but rows are of its first call: a part must "
                "be called once in each forward; leave it out of parts="
            )
        self._answered.add(index)
        device = next(self._model.parameters()).device
        refuse_other_autocast(device.type, call.computes_in)
        if self.is_proving:
            self._prove(index, rows, run, args, kwargs)
        needs = self._inner[index].need_gradients()
        return call.answered(rows, (args, kwargs), needs_gradients=needs)

    def _prove(
        self, index: int, rows: Tensor, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Raise a ValueError where a part returns something else than its rows hold.

        Rows are made without what is in lists, such as a detector's boxes, and a part may use it.
        """
        call = self._calls[index]
        with torch.no_grad():
            found = tree_leaves(run(*args, **kwargs))
            known = tree_leaves(call.answered(rows, (args, kwargs), needs_gradients=False))
        pairs = [*zip(found, known, strict=False)]
        is_same = len(found) == len(known) and not any(
            isinstance(a, Tensor) and differ(a, b, call.computes_in) for a, b in pairs
        )
        if not is_same:
            raise ValueError(
                f"{self.names[index]!r} returns something else where the forward is given a list "
                "of targets than without, and rows are made without: leave it out of parts=, or "
                "name a part that does not see them"
            )
        self._proven.add(index)


def refuse_other_autocast(kind: str, due: torch.dtype | None) -> None:
    """Raise a ValueError where autocast on a kind of device is not that of rows."""
    now = autocast_dtype(kind)
    if now != due:
        raise ValueError(
            f"the forward computes in {now or 'no autocast'}, but rows are computed in "
            f"{due or 'no autocast'}: give precision='bf16' or 'fp16' as the loop computes, or "
            "none, and evaluate as it trains"
        )

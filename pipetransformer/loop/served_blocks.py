"""Have a model's own forward start above its frozen blocks.

    block                 0           ...    depth - 1            depth
    with rows             hands on           returns the rows     runs
    without               runs               runs                 runs

Only `forward` of the frozen blocks is replaced, on the objects. So hooks, wrappers such as DDP,
and the rest of the model are called as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from pipetransformer.model import Row


@final
class ServedBlocks:
    """Replace what a row's frozen blocks compute by rows, while there are some."""

    def __init__(self, row: Row) -> None:
        self._row, self._depth = row, 0
        self._rows: Tensor | None = None
        self._replaced: dict[nn.Module, Callable[..., Any] | None] = {}

    def set_depth(self, depth: int) -> None:
        """Serve this many blocks from now on."""
        self.give_back()
        self._depth = depth
        for index, block in enumerate(self._row.blocks[:depth]):
            own = vars(block).get("forward")
            self._replaced[block] = own
            run = block.forward
            # Compiled code would know the rows of one batch alone.
            block.forward = torch._dynamo.disable(partial(self._forward, index, run))

    def give_back(self) -> None:
        """Let blocks run as they did."""
        for block, own in self._replaced.items():
            if own is None:
                del block.forward
            else:
                block.forward = own
        self._replaced.clear()

    @contextmanager
    def serving(self, rows: Tensor | None) -> Iterator[None]:
        """Give these rows, (B, ...), to each forward within the block; None gives none."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _forward(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows, call = self._rows, self._row.calls[index]
        if rows is None:
            return run(*args, **kwargs)
        hidden = call.hidden_in((args, kwargs))
        if index < self._depth - 1:
            return call.answered(hidden)
        rows = rows.transpose(0, 1) if self._row.samples_at else rows
        num, due = hidden.shape[self._row.samples_at], rows.shape[self._row.samples_at]
        if num != due:
            raise ValueError(
                f"the forward was given {num} samples of a batch of {due}: give it whole batches "
                "of `epoch`, or make the loader's batches smaller"
            )
        return call.answered(rows.to(hidden.device))

"""Have a model's own forward start above its frozen blocks.

    block                 0           ...    depth - 1            depth
    with rows             hands on           returns the rows     runs
    without               runs               runs                 runs

Only `forward` of the frozen blocks is replaced, on the objects. So hooks, wrappers such as DDP,
and the rest of the model are called as ever. A hook on the model looks at what each forward is
given. Copies and pickles of the model run from its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipetransformer.feed import FrozenPrefix
from pipetransformer.loop.given_batch import GivenBatch, inputs_of, refuse_unread
from pipetransformer.model import adapters_in_use, row_of

_LOGGER = logging.getLogger(__name__)


@final
class ServedBlocks:
    """Replace what a row's frozen blocks compute by rows, while there are some."""

    def __init__(self, prefix: FrozenPrefix) -> None:
        self._prefix, self._task = prefix, prefix.task
        self._row, self._depth = row_of(self._task.model), 0
        self._batch: GivenBatch | None = None
        # Rows that this forward may use: known from its start to its end.
        self._rows: Tensor | None = None
        self._not_read: Mapping[str, int] = {}
        self._replaced: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._frozen: dict[str, Tensor] = {}
        self._adapters: list[tuple[bool, str]] = []
        self._has_told = False

    def set_depth(self, depth: int) -> None:
        """Serve this many blocks from now on."""
        self.give_back()
        self._depth = depth
        blocks = self._row.blocks[:depth]
        if any(isinstance(vars(block).get("forward"), _Forward) for block in blocks):
            raise ValueError("the model is attached already; close what `attach` returned for it")
        for index, block in enumerate(blocks):
            own = vars(block).get("forward")
            block.forward = _Forward(block, own, partial(self._forward, index, block.forward))
            self._replaced.append(block)
        if depth:
            model = self._task.model
            self._frozen = {
                name: model.tensor(name)
                for name, index in model.owners.items()
                if model.sublayers[index].layer < depth
            }
            begin, end = _Hook(self._begin), _Hook(self._end)
            whole = model.model
            self._adapters = adapters_in_use(whole)
            self._handles = [
                whole.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
                whole.register_forward_hook(end, always_call=True),
            ]

    def give_back(self) -> None:
        """Let blocks run as they did."""
        for handle in self._handles:
            handle.remove()
        for block in self._replaced:
            replacement = vars(block)["forward"]
            if replacement.own is None:
                del block.forward
            else:
                block.forward = replacement.own
        self._handles.clear()
        self._replaced.clear()
        self._batch = self._rows = None

    @contextmanager
    def serving(self, batch: GivenBatch) -> Iterator[None]:
        """Let forwards of this batch use its rows within the block."""
        self._batch = batch
        # Also after the block: the loop may have kept the batch.
        self._not_read = {**self._not_read, **batch.not_read}
        try:
            yield
        finally:
            if self._batch is batch:
                self._batch = None

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rows = None
        given = inputs_of(model, self._task.model.targets, args, kwargs)
        if self._batch is not None and self._batch.is_in(given) and self._is_as_it_was():
            self._refuse_thawed()
            self._rows = self._batch.rows
            return
        refuse_unread(given, self._not_read)
        if self._batch is not None and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "within an epoch the model is given other inputs than the batch that `epoch` gave "
                "last, or is changed itself: it computes all blocks for them"
            )

    def _end(self, *_: object) -> None:
        self._rows = None

    def _is_as_it_was(self) -> bool:
        """Tell whether the frozen blocks compute what they did when rows were made."""
        in_use = adapters_in_use(self._task.model.model)
        return in_use == self._adapters and not self._prefix.is_edited()

    def _refuse_thawed(self) -> None:
        thawed = next((name for name, t in self._frozen.items() if t.requires_grad), None)
        if thawed is not None:
            raise ValueError(
                f"{thawed!r} of a frozen block needs a gradient again, which rows do not have: "
                "thaw with `freeze_bottom`"
            )

    def _forward(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows, call = self._rows, self._row.calls[index]
        if rows is None:
            if index == 0 and self._not_read:  # A part of the model may be called by itself.
                refuse_unread({"hidden states": call.hidden_in((args, kwargs))}, ["hidden states"])
            return run(*args, **kwargs)
        hidden = call.hidden_in((args, kwargs))
        if index < self._depth - 1:
            return call.answered(hidden)
        self._refuse_other_autocast(hidden.device.type)
        rows = rows.transpose(0, 1) if self._row.samples_at else rows
        rows = rows.to(hidden.device)
        if hidden.requires_grad:  # As reentrant checkpointing above needs it, or nothing learns.
            rows = rows.detach().requires_grad_()
        return call.answered(rows)

    def _refuse_other_autocast(self, kind: str) -> None:
        due = self._task.computes_in
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if now != due:
            raise ValueError(
                f"the forward computes in {now or 'no autocast'}, but rows were computed in "
                f"{due or 'no autocast'}: give `attach` the loop's dtype as precision='bf16' or "
                "'fp16', or none"
            )


@final
@dataclass(frozen=True)
class _Forward:
    """Be a block's forward. A copy or a pickle of the block gets its own forward."""

    block: nn.Module
    own: Callable[..., Any] | None
    call: Callable[..., Any]

    # Compiled code would know the rows of one batch alone.
    @torch._dynamo.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A block's copy exists when its attributes are copied, and has its class's forward yet.
        return (getattr, (self.block, "forward")) if self.own is None else (_same, (self.own,))


@final
@dataclass(frozen=True)
class _Hook:
    """Be a hook on the model. On a copy or a pickle of it, it does nothing."""

    call: Callable[..., None]

    @torch._dynamo.disable
    def __call__(self, *given: Any) -> None:
        self.call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (_ignore,)


def _same(value: Any) -> Any:
    return value


def _ignore(*_: object) -> None:
    """Do nothing."""

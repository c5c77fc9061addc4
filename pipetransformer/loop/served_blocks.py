"""Have a model's own forward start above its frozen blocks.

    block                 0           ...    depth - 1            depth
    with rows             hands on           returns the rows     runs
    without               runs               runs                 runs

A loop may take some batches before it runs them: rows are known for the last few that were given.
Where the depth has changed since, they are fetched anew.

Only `forward` of the frozen blocks is replaced, on the objects. So hooks, wrappers such as DDP,
and the rest of the model are called as ever. A hook on the model looks at what each forward is
given. Copies and pickles of the model run from its start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
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
    """Replace what a row's frozen blocks compute by rows, while there are some.

    Args:
        fetch_anew: returns a batch with its rows at the present depth.
    """

    def __init__(
        self, prefix: FrozenPrefix, fetch_anew: Callable[[GivenBatch], GivenBatch]
    ) -> None:
        self._prefix, self._task, self._fetch_anew = prefix, prefix.task, fetch_anew
        self._row, self._depth = row_of(self._task.model), 0
        self._given: deque[GivenBatch] = deque(maxlen=1)
        # Rows that this forward may use: known from its start to its end.
        self._rows: Tensor | None = None
        # Also of batches that are gone: the loop may have kept them.
        self._not_read: set[str] = set()
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
            # Compiled code would know the rows of one batch alone.
            served = torch.compiler.disable(partial(self._forward, index, block.forward))
            block.forward = _Forward(block, own, served)
            self._replaced.append(block)
        model = self._task.model
        self._frozen = {
            name: model.tensor(name)
            for name, index in model.owners.items()
            if model.sublayers[index].layer < depth
        }
        if depth or self._given:
            begin, end = (_Hook(torch.compiler.disable(one)) for one in (self._begin, self._end))
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
        self._rows = None

    def serve(self, batch: GivenBatch) -> None:
        """Let forwards of this batch use its rows, until some others were given."""
        self._given.append(batch)
        self._not_read |= batch.not_read

    @contextmanager
    def serving(self, batch: GivenBatch) -> Iterator[None]:
        """Let forwards within the block use this batch's rows alone."""
        others, self._given = self._given, deque([batch])
        try:
            yield
        finally:
            self._given = others

    def serve_none(self, *, num_known: int = 1) -> None:
        """Forget the batches that were given; of the next ones, know so many."""
        self._given = deque(maxlen=num_known)

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._rows = None
        if not self._depth and not self._not_read:
            return None  # Nothing was left out yet, and nothing is now.
        given = inputs_of(model, self._task.model.targets, args, kwargs)
        place = next((i for i, one in enumerate(self._given) if one.is_in(given)), None)
        if place is not None and self._is_as_it_was():
            self._refuse_thawed()
            if self._given[place].depth != self._depth:
                self._given[place] = self._fetch_anew(self._given[place])
            batch = self._given[place]
            self._rows = batch.rows
            return batch.filled_in(model, args, kwargs) if batch.read else None
        refuse_unread(given, self._not_read)
        # An evaluation is given other batches, as it should.
        if self._depth and self._given and model.training and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "within an epoch the model is given other inputs than the batch that the loader "
                "gave last, or is changed itself: it computes all blocks for them"
            )
        return None

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A block's copy exists when its attributes are copied, and has its class's forward yet.
        return (getattr, (self.block, "forward")) if self.own is None else (_same, (self.own,))


@final
@dataclass(frozen=True)
class _Hook:
    """Be a hook on the model. On a copy or a pickle of it, it does nothing."""

    call: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (_ignore,)


def _same(value: Any) -> Any:
    return value


def _ignore(*_: object) -> None:
    """Do nothing."""

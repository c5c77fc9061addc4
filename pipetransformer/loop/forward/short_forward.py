"""Have a model's own forward start above its frozen blocks.

                 entrance            block 0     ...    depth - 1           depth
    with rows    returns the rows    hands on           returns the rows    runs
    without      runs                runs               runs                runs

The entrance is the module below the blocks, if there is one, whose answer the first block takes,
such as embeddings. It is left out where the model was seen to return the same without it.

A hook on the model looks at what each forward is given: entries of a batch say themselves which
rows are theirs. They reach the model as plain tensors. In the place of an entry that was not read
comes one NaN, expanded; where its rows are of no use, its samples are read after all.

Only `forward` of the frozen blocks is replaced, on the objects. So hooks, wrappers such as DDP,
and the rest of the model are called as ever. Copies and pickles of the model run from its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipetransformer.feed import FrozenPrefix
from pipetransformer.loop.batches import TOKENS, BatchEntry, Mark
from pipetransformer.loop.forward.forward_call import (
    ForwardCall,
    LoopCall,
    RowBatch,
    holds_entries,
    with_plain,
)
from pipetransformer.loop.forward.model_hooks import BlockForward, ModelHook
from pipetransformer.loop.forward.model_watch import HOOKS, ModelWatch, hold_others
from pipetransformer.loop.forward.served_parts import ServedParts, refuse_other_autocast
from pipetransformer.model import adapter_names, adapters_in_use, modules_with_adapters, row_of

_LOGGER = logging.getLogger(__name__)

_WRITTEN = -1
"""The depth of rows that something above the blocks has written into."""


@final
class ShortForward:
    """Replace what a row's frozen blocks compute by rows, where a forward has some.

    Args:
        calls: what the loop gives the model, by columns.
        watch: of what is frozen, and of what lies around it.
        learn: told what the loop gives the model, and what else of the first batch; returns what
            serves that.
        renew: brings a batch's rows to the present depth, and to a call's column.
        read: returns what the loader has for a batch's samples, (R, ...) each, by its names.

    Attributes:
        depth: number of blocks that rows may take the place of.
        is_confirmed: whether a forward was given what was expected, or has said what it is given.
        num_served: forwards that rows were used in.
        is_awaited: whether a loop is within an epoch whose batches have rows.
        leaves_out: whether the entrance is left out, too.
        place: of the loop whose batches it serves; those of another `attach` have other rows.
        agree: where ranks must all have rows for a forward, or none: says whether all have, and
            is told which modules do not run, then.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        calls: tuple[LoopCall, ...],
        watch: ModelWatch,
        *,
        learn: Callable[[LoopCall], ShortForward],
        renew: Callable[[RowBatch, LoopCall], None],
        read: Callable[[RowBatch], Mapping[str, Tensor]],
    ) -> None:
        self._prefix, self._task, self._renew, self._read = prefix, prefix.task, renew, read
        self.watch, self._learn, self.is_confirmed = watch, learn, False
        self._row, self.depth = row_of(self._task.model), 0
        self._parts = ServedParts(self._task)
        self._call = ForwardCall(
            self._task.model.model,
            calls,
            of_parts=bool(self._parts.names),
            of_routers=self._row.routers is not None,
            of_joined=self._task.model.padding_mask == TOKENS,
        )
        self.is_awaited, self.num_served, self.leaves_out = False, 0, False
        # Rows that this forward may use, known from its start to its end, and whose they are.
        self._rows: Tensor | None = None
        self._version, self._batches = 0, list[RowBatch]()
        self._nan: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._replaced: list[nn.Module] = []
        self._frozen: dict[str, tuple[dict[str, Any], str]] = {}
        self._with_adapters = modules_with_adapters(self._task.model.model.modules())
        self._adapters = adapters_in_use(self._with_adapters)
        self._has_told = self._is_paused = self._has_seen_autocast = False
        self.place: object = None
        self.agree: Callable[[bool, Sequence[nn.Module]], bool] | None = None
        # From the first batch on, as it may be run when all is thawed.
        begin, end = (ModelHook(torch.compiler.disable(one)) for one in (self._begin, self._end))
        whole = self._task.model.model
        self._handles: list[RemovableHandle] = [
            whole.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            whole.register_forward_hook(end, always_call=True),
        ]

    def set_depth(self, depth: int, *, is_to_come: bool = False) -> None:
        """Serve this many blocks from now on.

        Args:
            is_to_come: whether nothing is frozen yet, and rows may be served later.
        """
        self.give_back()
        self.depth = depth
        blocks = list(self._row.frozen(depth))
        serving = [partial(self._forward, i) for i in range(len(blocks))]
        if self._row.packing is not None:
            serving = [partial(self._part, i) for i in range(len(blocks))]
        elif is_to_come and not self._has_seen_autocast:
            blocks, serving = [self._row.blocks[0]], [partial(self._unfrozen)]
        if any(isinstance(vars(block).get("forward"), BlockForward) for block in blocks):
            raise ValueError(
                "the model is attached already; close what serves it: what `attach` returned for "
                "it, or another training"
            )
        for block, serve in zip(blocks, serving, strict=True):
            self._replace(block, serve)
        for module, answer in self._row.idle if depth else ():
            self._replace(module, partial(self._idle, answer))
        entrance = self._row.entrance
        if depth and entrance is not None and entrance not in self._row.called_above:
            parts = [vars(part) for part in entrance.modules() if part is not entrance]
            hooks = [part[name] for part in parts for name in HOOKS]
            self._replace(entrance, partial(self._enter, hooks))
        model = self._task.model
        # Where they lie, as `load_state_dict(assign=True)` puts others there.
        self._frozen = {
            name: (vars(holder)["_parameters"], attribute)
            for name, index in model.owners.items()
            if model.sublayers[index].layer < depth
            for holder, attribute in [model.holder(name)]
        }
        # Those above the frozen blocks may be switched off: rows are the same.
        watched = self.watch.modules if depth else model.model.modules()
        self._with_adapters = modules_with_adapters(watched)
        self._adapters = adapters_in_use(self._with_adapters)

    def _replace(self, module: nn.Module, serve: Callable[..., Any]) -> None:
        """Have a module call `serve` with its forward, and what that is given."""
        own = vars(module).get("forward")
        # Compiled code would know the rows of one batch alone.
        served = torch.compiler.disable(partial(serve, module.forward))
        module.forward = BlockForward(module, own, served)
        self._replaced.append(module)

    @property
    def is_serving(self) -> bool:
        """Return whether a forward is under way that has rows."""
        return self._rows is not None

    def give_back(self) -> None:
        """Let blocks run as they did."""
        for block in self._replaced:
            replacement = vars(block).get("forward")
            if not isinstance(replacement, BlockForward):
                continue  # Somebody has put another in its place.
            if replacement.own is None:
                del block.forward
            else:
                block.forward = replacement.own
        self._replaced.clear()
        self._rows, self.depth = None, 0

    def pause(self) -> None:
        """Let the model run as it did until `resume`, as where another serves it meanwhile."""
        depth = self.depth
        self.give_back()
        self.depth, self._is_paused = depth, True

    def resume(self) -> None:
        """Serve again what was served before `pause`."""
        self._is_paused = False
        self.set_depth(self.depth)

    def close(self) -> None:
        """Let the model run as it did."""
        self.give_back()
        for handle in self._handles:
            handle.remove()

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._rows = None
        if self._is_paused:
            return None
        self._parts.begin(has_lists=self._call.gives_lists(args, kwargs))
        if not holds_entries(args, kwargs):
            self._have_all_agree()
            self._tell_once(model)
            return None
        is_usual = adapters_in_use(self._with_adapters) == self._adapters
        if (
            is_usual
            and not self.is_confirmed
            and (call := self._call.learned(args, kwargs)) is not None
        ):
            if call != self._call.calls[0] and (other := self._learn(call)) is not self:
                return other._begin(model, args, kwargs)
            self.is_confirmed = True
        found = self._call.rows_of(args, kwargs)
        if found is not None and any(b.place is not self.place for b in found[0].batches.values()):
            found = None
        # Only in the first batch entries say their names that no known call is given.
        more = self._call.learned(args, kwargs) if found is None and is_usual else None
        if more is not None:
            self._learn(more)
        self.refuse_replaced()
        if found is not None and self.depth and self._is_as_it_was():
            self._refuse_thawed()
            self._rows = self._rows_of(*found)
        self._have_all_agree()
        if self._rows is not None:
            self.num_served += 1
            self._version = self._rows._version
            self._batches = [] if found is None else [*found[0].batches.values()]
        elif more is None or any(more.parameters == one.parameters for one in self._call.calls):
            self._tell_once(model)
        return with_plain(args, kwargs, self._plain)

    def _have_all_agree(self) -> None:
        """Use no rows in this forward where another rank has none for its own."""
        if self.agree is None:
            return
        entrance = self._row.entrance
        runs = () if self.leaves_out or entrance is None else (entrance,)
        idle = [one for one in self._replaced if one not in runs]
        if not self.agree(self._rows is not None, idle):
            self._rows = None

    def expect(self, call: LoopCall) -> None:
        """Expect another call from now on, for which rows are the same."""
        self._call.calls = (call,)

    def _tell_once(self, model: nn.Module) -> None:
        # An evaluation is given other batches, as it should.
        if self.depth and self.is_awaited and model.training and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "within an epoch the model is given other inputs than the loader's batches have, "
                "or is changed itself: it computes all blocks for them"
            )

    def _rows_of(self, mark: Mark, call: LoopCall) -> Tensor | None:
        """Return the rows of a mark's batches, (R, ...); None where one has none."""
        batches: list[RowBatch] = [*mark.batches.values()]
        for batch in batches:
            is_old = batch.depth != self.depth or batch.stamp != self._prefix.stamp
            if is_old or not batch.call.has_rows_of(call):
                self._renew(batch, call)
        found = [batch.rows for batch in batches if batch.rows is not None]
        if len(found) < len(batches):
            return None
        if mark.table is batches[0].table:
            return found[0]
        if len({rows.shape[1:] for rows in found}) > 1:  # Padded to other lengths.
            return None
        numbers, places = mark.table.unbind(1)
        taken = found[0].new_empty((len(places), *found[0].shape[1:]))
        for batch, rows in zip(batches, found, strict=True):
            own = (numbers == batch.number).nonzero().flatten()
            taken[own.to(rows.device)] = rows[places[own].to(rows.device)]
        return taken

    def _plain(self, entry: BatchEntry) -> Tensor:
        """Return an entry's values; of what was not read one NaN, or what is read now."""
        value, mark = entry.content(), entry.mark()
        if value is not None:
            return value
        assert mark is not None
        if self._rows is not None:
            kind = entry.dtype, entry.device
            if kind not in self._nan:
                self._nan[kind] = torch.full((), torch.nan, dtype=kind[0], device=kind[1])
            return self._nan[kind].expand(entry.shape)
        batches: list[RowBatch] = [*mark.batches.values()]
        read = {
            batch.number: (self._read if batch.place is self.place else batch.read)(batch)[
                mark.name
            ]
            for batch in batches
        }
        rows = [read[number][place] for number, place in mark.table.tolist()]
        return torch.stack(rows).to(entry.device, entry.dtype)

    def _end(self, _model: nn.Module, _given: object, answer: object) -> None:
        missed = self._parts.left_out
        is_read = all(not batch.not_read for batch in self._batches)
        if self._rows is not None and missed and not is_read and answer is not None:
            self._rows = None
            raise ValueError(
                f"this forward leaves out {missed!r}, which it has called before, and computes "
                f"of what was not read, as it had rows: give reads={self._inputs!r}"
            )
        if self._rows is not None and self._rows._version != self._version:
            for batch in self._batches:  # The next forward of them needs what was read.
                batch.depth = _WRITTEN
        self._rows = None

    def _is_as_it_was(self) -> bool:
        """Return whether frozen blocks compute what they did for rows, and no hook misses it."""
        in_use = adapters_in_use(self._with_adapters)
        edited = self._prefix.is_edited() or self.watch.changed()
        ours = (vars(block).get("forward") for block in self._replaced)
        edited = edited or not all(isinstance(one, BlockForward) for one in ours)
        return in_use == self._adapters and not edited and not self._parts.miss_hooks()

    def refuse_replaced(self) -> None:
        """Raise a ValueError where a module that is frozen, or around the blocks, is another."""
        if self.depth and (self.watch.replaced() or not self._prefix.is_whole()):
            raise ValueError(
                "a module of the frozen blocks, or below them, was replaced, and rows were made "
                "by the one before: close this loop and attach the model anew, or begin another "
                "training"
            )

    def _refuse_thawed(self) -> None:
        frozen = ((name, table.get(key)) for name, (table, key) in self._frozen.items())
        thawed = {name: p for name, p in frozen if p is not None and p.requires_grad}
        if thawed and self._adapters:
            # peft lets adapters learn whenever it switches them, those of frozen blocks, too.
            for name in thawed.keys() & adapter_names(self._task.model.model):
                thawed.pop(name).requires_grad_(False)
        if not thawed:
            return
        what, how = "block", "thaw by what you gave as freeze=, or with `freeze_bottom`"
        if self._parts.names:
            what = "part"
            how = "parts stay frozen until `close`, or the end of a training with the callback"
        raise ValueError(
            f"{next(iter(thawed))!r} of a frozen {what} needs a gradient again, which rows do not "
            f"have: {how}"
        )

    def _forward(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows, call = self._rows, self._row.calls[index]
        if rows is None:
            return run(*args, **kwargs)
        hidden, routers = call.hidden_in((args, kwargs)), self._row.routers
        if routers is not None:
            routers.tell(rows.to(hidden.device), index, self.depth)
        if index < self.depth - 1:
            return call.answered(hidden)
        refuse_other_autocast(hidden.device.type, self._task.computes_in)
        rows = self._states(rows).to(hidden.device)
        if hidden.requires_grad:  # As reentrant checkpointing above needs it, or nothing learns.
            rows = rows.detach().requires_grad_()
        return call.answered(rows)

    def _unfrozen(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Refuse another autocast in the first step, not only where rows are first served."""
        if self._task.model.model.training and torch.is_grad_enabled():
            self._has_seen_autocast = True
            self.give_back()
            hidden = self._row.calls[0].hidden_in((args, kwargs))
            refuse_other_autocast(hidden.device.type, self._task.computes_in)
        return run(*args, **kwargs)

    def _states(self, rows: Tensor) -> Tensor:
        """Return the hidden states of rows, as blocks hand them on."""
        if self._row.routers is not None:
            rows = self._row.routers.hidden(rows, self.depth)
        return rows.transpose(0, 1) if self._row.samples_at else rows

    def _enter(
        self, hooks: Sequence[Any], run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        # A hook on a part of it would miss its call.
        if self._rows is None or not self.leaves_out or hold_others(hooks):
            return run(*args, **kwargs)
        # A hook may have it need a gradient, as peft's does.
        rows = self._states(self._rows).detach()
        needs = any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values()))
        return rows.requires_grad_(needs and torch.is_grad_enabled())

    def _part(self, index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._rows is None:
            self._refuse_unread_again(self._parts.names[index], (args, kwargs))
            return run(*args, **kwargs)
        return self._parts.answer(index, self._rows, run, args, kwargs)

    def _idle(self, answer: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A part that is proven would be given NaN.
        if self._rows is None or self._parts.is_proving:
            return run(*args, **kwargs)
        return answer.blank(len(self._rows), next(self._task.model.model.parameters()).device)

    def _refuse_unread_again(self, name: str, given: Any) -> None:
        """Raise a ValueError where a checkpoint runs a part again, on what was not read."""
        if torch._C._current_graph_task_id() == -1 or not self.num_served:
            return
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if any(leaf.is_floating_point() and bool(leaf.isnan().any()) for leaf in leaves):
            raise ValueError(
                f"a checkpoint runs {name!r} again in the backward, but has nothing to run it on, "
                f"as it had a row: give reads={self._inputs!r}, or checkpoint only what is behind "
                "it"
            )

    @property
    def _inputs(self) -> tuple[str, ...]:
        return tuple(name for call in self._call.calls for name in call.parameters)

"""Find out whether rows can take the place of a model's frozen blocks, before any is stored.

What the last frozen block returns for a sample must be a function of that sample, and all that the
blocks do for the rest of the model and for the loop. So a few samples are run:

    twice · in training and not · alone and beside others · with their labels · from rows

Each finding is a sentence. Nothing is changed by a look; no copy of the model is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autocache import own_lengths
from autopipe.profile import graph_leaves
from autopipe.random_state import random_state
from pipetransformer.checks import differ
from pipetransformer.feed import Batch, Samples
from pipetransformer.loop.batches import TOKENS
from pipetransformer.loop.forward import (
    InnerHooks,
    ModelWatch,
    PartialForward,
    left_alone,
    looking_hook,
)
from pipetransformer.model import (
    Reads,
    Task,
    UnlikeAnswerError,
    attributes_of,
    forward_parameters,
    whole_in_mode,
)

_NUM_SAMPLES, _NUM_ALONE = 3, 2
"""Samples that run together, and how many of them by themselves, too."""
_MOST_MEMBERS = 64


class _Finding(Exception):
    """Say why rows would be wrong."""


@final
@dataclass(frozen=True)
class RowProbe:
    """Look at a task's model, whose bottom blocks are frozen.

    Args:
        samples: of the data set.
        watches: of the model; what its forward itself changes is watched no more.
        short: runs the model's own forward on samples' entries, from their rows.
        leave_out: says whether `short` leaves out what lies below the blocks.
    """

    task: Task
    samples: Samples
    partial: PartialForward
    watches: tuple[ModelWatch, ...]
    device: torch.device
    short: Callable[[Batch, Tensor, Mapping[str, Tensor]], Any]
    leave_out: Callable[[bool], None]

    def why_not(self, depth: int) -> str:
        """Return why rows of so many blocks would be wrong; "" where nothing was found."""
        off = torch.autocast(self.device.type, enabled=False)  # Not that around the loop.
        with left_alone(self.task.model.model, self.device), off:
            try:
                self._look(depth)
            except (_Finding, UnlikeAnswerError) as finding:
                return str(finding)
        return ""

    def _look(self, depth: int) -> None:
        row = self.partial.row
        for part in row.blocks if self._is_packed else ():
            if name := InnerHooks(part).missed_at():
                raise _Finding(f"a hook on {name!r} within waits for calls that would not come")
        self.partial.draws = False
        ids = self.samples.spread(_NUM_SAMPLES)
        if len(ids) == 1:
            ids = ids * 2
        together = self.samples.probe(ids)
        entries, targets = self._split(together)
        with torch.no_grad():
            hidden, answers = self._run(entries, depth)
            if not self._is_packed:
                name = looking_hook(row.frozen(depth), lambda: self._run(entries, depth))
                if name:
                    raise _Finding(
                        f"a hook on {name} looks at what rows take the place of (remove it, or "
                        "have it return the answer that it is given)"
                    )
        is_joined = self.task.model.padding_mask == TOKENS
        if is_joined:  # In one row they see each other in either mode.
            self._look_at_mates(ids, entries, hidden, answers, depth)
        may_leave_out = self._look_at_training(entries, targets, hidden, depth)
        if not is_joined:
            self._look_at_mates(ids, entries, hidden, answers, depth)
        self._look_from_rows(entries, hidden, targets, may_leave_out=may_leave_out)

    def _ignore_changes(self) -> None:
        for watch in self.watches:
            watch.ignore_changes()

    @property
    def _is_packed(self) -> bool:
        return self.partial.row.packing is not None

    def _differ(self, one: Tensor, other: Tensor) -> bool:
        return differ(one, other, self.task.computes_in)

    def _rows_differ(self, one: Tensor, other: Tensor) -> bool:
        packing = self.partial.row.packing
        if packing is None or one.shape != other.shape:
            return self._differ(one, other)
        mine, others = map(packing.tensors, (one, other))
        pairs = zip(mine, others, strict=True)
        return any(a.shape != b.shape or self._differ(a, b) for a, b in pairs)

    def _split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return a batch's inputs, and the targets that the loop gives a forward."""
        inputs = self.task.model.inputs
        taken = {*inputs, self.task.model.padding_mask}
        takes = {*forward_parameters(self.task.model.model)} - {*inputs}
        targets = {n: one for n, one in self.partial.call.targets.items() if one in takes}
        return (
            {name: entry for name, entry in batch.items() if name in taken},
            {one: batch[name].to(self.device) for name, one in targets.items() if name in batch},
        )

    def _run(self, entries: Batch, depth: int, **mode: Any) -> tuple[Tensor, list[Any]]:
        torch.manual_seed(0)
        return self.partial(entries, last=depth, **mode)

    def _look_at_training(
        self, entries: Batch, targets: Batch, hidden: Tensor, depth: int
    ) -> bool:
        """Look at blocks in training; return whether the entrance keeps nothing of a batch."""
        row, entrance = self.partial.row, self.partial.row.entrance
        blocks = [*row.frozen(depth), *(module for module, _ in row.idle)]
        read = set[int]()
        with torch.enable_grad(), Reads(read.add):
            trained, answers = self._run_without_draws(entries, depth)
        self._ignore_changes()
        # A packed row has no graph, and another chain hands on nothing but its hidden state.
        tokens = entries.get(TOKENS)
        begins = (len(hidden),) if tokens is None else (1, int(tokens.sum()))
        for one in [trained] if not self._is_packed else tensors_in(answers):
            if learned := _learned(one, begins):
                raise _Finding(f"{learned} takes part in what they return, and goes on learning")
        self._look_at_learned(read, entries, trained.detach(), depth)
        watched = [*blocks, *([] if entrance is None else [entrance])]
        had = [_noted(module) for module in watched]
        # Other samples of the same shapes: a sum over a batch is the same in any order.
        order = torch.tensor([1, 0, *range(len(hidden) - 2)], device=hidden.device)
        others = {n: t[order.to(t.device)] for n, t in {**entries, **targets}.items()}
        with torch.no_grad():
            again, _ = self._run(others, depth, training=True)
            if targets and self._rows_differ(again, hidden[order]):
                again, _ = self._run({n: others[n] for n in entries}, depth, training=True)
                if not self._rows_differ(again, hidden[order]):
                    raise _Finding(f"what they return depends on {sorted(targets)}")
        if self._rows_differ(trained.detach(), hidden) or self._rows_differ(again, hidden[order]):
            raise _Finding(
                "in training the model does something below them, or between them, that it does "
                "not do in evaluation (noise, statistics of a batch, a factor)"
            )
        for index, (before, module) in enumerate(zip(had, watched, strict=True)):
            if name := _what_changed(before, _noted(module)):
                if index == len(blocks):
                    return False
                is_idle = index >= len(row.frozen(depth))
                what = f"a {type(module).__name__} below them" if is_idle else f"block {index}"
                raise _Finding(
                    f"{what} keeps {name!r} of each batch, which the loop or the model may "
                    "read, and would not find where rows are read"
                )
        return entrance is not None

    def _look_at_learned(self, read: set[int], entries: Batch, hidden: Tensor, depth: int) -> None:
        """Raise a finding where what trains reaches a part by a way that has no gradient."""
        named = self.task.model.model.named_parameters()
        learned = {n: p for n, p in named if id(p) in read and p.requires_grad}
        values = {name: parameter.data for name, parameter in learned.items()}
        for change in (torch.randn_like, lambda value: -1 - value) if learned else ():
            try:
                for name, parameter in learned.items():
                    parameter.data = change(values[name])
                with torch.no_grad():
                    again, _ = self._run(entries, depth, training=True)
                differs = self._rows_differ(again, hidden)
            except RuntimeError:  # It does not run with such values.
                differs = True
            finally:
                for name, parameter in learned.items():
                    parameter.data = values[name]
            if differs:
                raise _Finding(
                    f"they are given what is computed from {_shortly(learned)}, which trains"
                )

    def _run_without_draws(self, entries: Batch, depth: int) -> tuple[Tensor, list[Any]]:
        """Return what blocks return in training, where nothing below their end draws."""
        torch.manual_seed(0)
        before, trained, failure = random_state(self.device), None, None
        answers: list[Any] = []
        try:
            trained, answers = self.partial(entries, last=depth, training=True)
        except RuntimeError as error:  # A block that was dropped is not reached.
            failure = error
        # Parts' forward draws what it draws below them with rows, too.
        draws = random_state(self.device) != before
        if draws and self._is_packed and self.partial.draws:
            raise _Finding("they draw random numbers, which others would get where rows are read")
        if draws and not self._is_packed:
            raise _Finding(
                f"a training forward draws random numbers below block {depth} (it drops blocks, "
                "or hidden states between them), which rows would lack; set that to 0 in its "
                "configuration"
            )
        if trained is None:
            assert failure is not None
            raise failure
        return trained, answers

    def _look_at_mates(
        self, ids: Sequence[int], entries: Batch, hidden: Tensor, answers: list[Any], depth: int
    ) -> None:
        mask = entries.get(self.task.model.padding_mask or "")
        plain = [_plain_leaves(answer) for answer in answers]
        for place, index in enumerate(ids[:_NUM_ALONE]):
            alone, _ = self._split(self.samples.probe([index]))
            with torch.no_grad():
                own, others = self._run(alone, depth)
            mate = hidden[place : place + 1]
            if mask is not None and own.shape != mate.shape:
                num = int(own_lengths(mask[place : place + 1]))
                own, mate = own[:, :num], mate[:, :num]
            if own.shape == mate.shape and self._rows_differ(own, mate):
                raise _Finding(
                    "what they return for a sample depends on the other samples of its batch, or "
                    "on its padding"
                )
            if [_plain_leaves(answer) for answer in others] != plain:
                raise _Finding(
                    "beside its hidden state a block returns a number that depends on the sample"
                )

    def _look_from_rows(
        self, entries: Batch, hidden: Tensor, targets: Batch, *, may_leave_out: bool
    ) -> None:
        """Compare all that the model returns, and keeps, with rows and without."""
        given = {name: entry.to(self.device) for name, entry in entries.items()} | targets
        # What a model has noted of its last batch must not be taken for its answer from rows.
        others = {name: entry.roll(1, 0) for name, entry in given.items()}
        try:
            own = self._run_whole(lambda: self.partial.whole(given))
            self._run_whole(lambda: self.partial.whole(others))
        except Exception as error:  # Any: it cannot be run on these entries alone.
            if self._is_packed and not self.partial.runs_together:
                raise _Finding(
                    "they return other numbers of entries than samples, and whether these are in "
                    f"the samples' order cannot be seen, as the model fails: {error!r}"
                ) from error
            self.leave_out(False)
            return
        for leaves_out in (True, False)[not may_leave_out :]:
            self.leave_out(leaves_out)
            why = self._differs_from(own, lambda: self.short(entries, hidden, targets))
            if not why:
                return
        raise _Finding(why)

    def _differs_from(self, own: list[Tensor], run: Callable[[], Any]) -> str:
        """Say why a run from rows is not the model's own, or "" where it is."""
        try:
            short = self._run_whole(run)
        except Exception as error:  # Any: it is the model's own.
            return f"without what they return beside the hidden state the model fails: {error!r}"
        if len(own) == len(short) and not any(map(self._differ, short, own)):
            return ""
        return (
            "from rows the model returns, or keeps in its buffers, something else than when they "
            "run"
        )

    def _run_whole(self, run: Callable[[], Any]) -> list[Tensor]:
        """Return all tensors that the model returns, and keeps, in training."""
        model = self.task.model.model
        with (
            left_alone(model, self.device),
            torch.no_grad(),
            whole_in_mode(model, training=True),
            self.task.computing(self.device),
        ):
            torch.manual_seed(0)
            leaves = tensors_in(run())
            self._ignore_changes()
            # Also what it keeps aside, for a loss.
            kept = tree_leaves([attributes_of(module) for module in model.modules()])
            leaves += (one.clone() for one in kept if isinstance(one, Tensor))
            return [*leaves, *(t.clone() for _, t in model.named_buffers())]


def _shortly(names: Iterable[str]) -> str:
    first, *more = map(repr, names)
    return f"{first} and {len(more)} more" if more else first


def _plain_leaves(answer: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(answer) if not isinstance(leaf, Tensor)]


def tensors_in(answer: Any, *, depth: int = 3) -> list[Tensor]:
    """Return the tensors of an answer, also those in attributes of objects within."""
    found = list[Tensor]()
    for leaf in tree_leaves(answer):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and _is_opened(leaf):
            found += tensors_in(dict(vars(leaf)), depth=depth - 1)
    return found


def _is_opened(value: Any) -> bool:
    # Keys and values for the next token, which no training reads.
    is_cache = any(kind.__name__ == "Cache" for kind in type(value).__mro__)
    return hasattr(value, "__dict__") and not is_cache and not isinstance(value, (nn.Module, type))


def _learned(hidden: Tensor, begins: tuple[int, ...]) -> str:
    """Name a tensor that a hidden state would hand a gradient to.

    Args:
        begins: first sizes of what the blocks are given.
    """
    for leaf in graph_leaves([hidden]):
        # Trainers have an embedding's output need a gradient, as reentrant checkpointing asks.
        if isinstance(leaf, nn.Parameter) or leaf.shape[: len(begins)] != begins:
            return f"a tensor of shape {tuple(leaf.shape)}"
    return ""


_Noted = dict[tuple[nn.Module, str, int], Any]
"""What modules hold in plain attributes: numbers, and tensors by identity and version."""


def _noted(block: nn.Module) -> _Noted:
    noted: _Noted = {}
    for module in block.modules():
        made = {n.removesuffix(end) for n in module._parameters for end in ("_g", "_orig")}
        for name, value in attributes_of(module).items():
            if name in made:  # By the hook of torch's weight norm, or spectral norm.
                continue
            several = list(value.values()) if isinstance(value, dict) else value
            if not isinstance(several, (list, tuple)):
                several = [several]
            for place, one in enumerate(several[:_MOST_MEMBERS]):
                if isinstance(one, Tensor):
                    version = -1 if one.is_inference() else one._version
                    noted[module, name, place] = id(one), version
                elif isinstance(one, (int, float)) and one == one:
                    noted[module, name, place] = one
    return noted


def _what_changed(before: _Noted, now: _Noted) -> str:
    """Name the attribute in which a block has noted something of a batch."""
    keys = before.keys() | now.keys()
    return next((key[1] for key in keys if before.get(key) != now.get(key)), "")

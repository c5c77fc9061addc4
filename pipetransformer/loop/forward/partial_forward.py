"""Run a model's own forward up to one of its blocks, from its start or from a row.

    block        0 .. first - 2    first - 1            first .. last - 2    last - 1
    from rows    hands on          returns the rows     runs                 runs, and is the end
    from 0                                              runs                 runs, and is the end

What is returned is what the last block's `forward` returns, before its hooks: these act where the
row is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from autocache import HIDDEN
from autopipe.random_state import random_state
from pipetransformer.checks import differ
from pipetransformer.loop.batches import TOKENS, Bundles, JoinedTexts
from pipetransformer.loop.forward.forward_call import LoopCall
from pipetransformer.loop.forward.part_cuts import PartCuts, Reached
from pipetransformer.loop.forward.replaced_forward import in_own_forward
from pipetransformer.model import (
    Row,
    Task,
    UnlikeAnswerError,
    forward_parameters,
    replaced,
    row_of,
    whole_in_mode,
)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return in what autocast computes now on a kind of device; None outside of it."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class _LeftOutError(RuntimeError):
    """Say that a model's forward has not called a part."""


def _run_plainly(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _singles(entries: Mapping[str, Tensor], num: int) -> Iterator[dict[str, Tensor]]:
    """Yield the entries of each sample alone."""
    for place in range(num):
        yield {name: one[place : place + 1] for name, one in entries.items()}


@final
class PartialForward:
    """Run the forward of a task's model; see the module.

    Attributes:
        row: of blocks.
        call: how the loop gives entries.
        beside: entries, (1, ...) each, that the forward is given, too, and parts do without.
        draws: whether a part has drawn random numbers.

    Args:
        example: of all inputs, (N, ...) each. Of those that are not at hand one NaN is given.
        call: see above.
        bundles: what samples have any number of; or joins samples along their tokens.
    """

    def __init__(
        self,
        task: Task,
        example: Mapping[str, Tensor],
        call: LoopCall,
        bundles: Bundles | JoinedTexts,
    ) -> None:
        self._task, self._model = task, task.model.model
        self.row: Row = row_of(task.model)
        self._example = {name: example[name] for name in task.model.inputs}
        takes = forward_parameters(self._model)
        self.call, self.beside, self._bundles = call, dict[str, Tensor](), bundles
        self._keywords = {"use_cache": False} if "use_cache" in takes else {}
        self.draws = False
        self._cuts, self._run_part = PartCuts(self.row.blocks), _run_plainly

    @property
    def runs_together(self) -> bool:
        """Return whether samples run together, as parts return one entry for each."""
        return self.row.packing is None or self.row.packing.most_bytes is None

    def whole(self, entries: Mapping[str, Tensor], *, is_opened: bool = False) -> Any:
        """Run the whole forward on entries, as the loop does; return its answer.

        Args:
            is_opened: whether bundles are what a model takes.
        """
        num = len(next(iter(entries.values())))
        given = {**self.beside_of(num), **entries}
        given = given if is_opened else self._bundles.opened(given)
        args, kwargs = self.call.arguments(given)
        return self._model(*args, **{**self._keywords, **kwargs})

    def beside_of(self, num: int) -> dict[str, Tensor]:
        """Return what parts do without, of so many samples that are one."""
        device = next(self._model.parameters()).device
        return {
            name: one.to(device).expand(num, *one.shape[1:]) for name, one in self.beside.items()
        }

    def __call__(
        self,
        entries: Mapping[str, Tensor],
        *,
        last: int,
        first: int = 0,
        hidden: Tensor | None = None,
        training: bool = False,
    ) -> tuple[Tensor, list[Any]]:
        """Run it.

        Args:
            entries: inputs, (B, ...) each, and maybe targets.
            hidden: (B, ...), what block first - 1 returns.
            training: the mode of all modules that are not frozen.
        Returns:
            (B, ...), what block last - 1 returns, and all answers of the blocks that ran.
        """
        num = len(next(iter(entries.values())) if hidden is None else hidden)
        if not self.runs_together:
            return self._one_by_one(entries, num, last=last, training=training)
        if isinstance(self._bundles, JoinedTexts):
            own = {} if hidden is None else {HIDDEN: hidden, TOKENS: entries[TOKENS]}
            hidden = self._bundles.opened(own).get(HIDDEN)
        routers, rows = self.row.routers, hidden
        if routers is not None and rows is not None:
            hidden = routers.hidden(rows, first)
        gathering = nullcontext(list[Tensor]()) if routers is None else routers.gathered(last)
        with gathering as logits:
            answers = self._run(entries, first=first, last=last, hidden=hidden, training=training)
        reached = self._reached(answers, last, num)
        if routers is not None:
            below = [] if rows is None else [rows[..., reached.shape[-1] :]]
            reached = routers.joined(reached, [*below, *logits])
        if isinstance(self._bundles, JoinedTexts):
            reached = self._bundles.parted(reached, entries[TOKENS])
        return reached, answers

    def _run(
        self,
        entries: Mapping[str, Tensor],
        *,
        first: int,
        last: int,
        hidden: Tensor | None,
        training: bool,
    ) -> list[Any]:
        answers: list[Any] = []
        num = len(next(iter(entries.values())) if hidden is None else hidden)
        device = next(self._model.parameters()).device
        given = {name: self._given(name, entries, num, device) for name in self._example}
        given |= {n: entry.to(device) for n, entry in entries.items() if n not in given}
        with (
            whole_in_mode(self._model, training=training),
            in_own_forward(self._model),
            torch.autocast(device.type, enabled=False),  # Not that around the loop.
            self._task.computing(device),
            self._replaced(first, last, hidden, answers),
        ):
            try:
                self.whole(given)
            except Reached:
                return answers
        if self.row.packing is not None:
            names = zip(self.row.packing.names, answers, strict=True)
            missed = [name for name, answer in names if answer is None]
            raise _LeftOutError(
                f"the model's forward has left out {', '.join(map(repr, missed))}, which it has "
                "called before; parts must be called in each forward: close this loop where that "
                "changes"
            )
        raise RuntimeError(f"the model's forward has left out its block {last - 1}")

    def _one_by_one(
        self, entries: Mapping[str, Tensor], num: int, **how: Any
    ) -> tuple[Tensor, list[Any]]:
        """Run samples alone: of several at once it is not known whose an entry is."""
        own = num  # A chunk is filled up with its last sample, which runs once.
        while own > 1 and all(torch.equal(one[own - 1], one[own - 2]) for one in entries.values()):
            own -= 1
        entries = {name: one[:own] for name, one in entries.items()}
        places = torch.arange(num).clamp(max=own - 1)
        self._cuts.begin()
        if own > 1 and self._cuts.expects and not how["training"]:
            known = self._together(entries, own, **how)
            if known is not None:
                return known[0][places], known[1]
            self._cuts.begin()
        with self._running_part(self._cuts.note, **how):
            alone = [self._alone(one, **how) for one in _singles(entries, own)]
            if own == 1 and (mate := self._mate_of(entries)) is not None:
                entries = {n: torch.cat([entries[n], o.to(entries[n])]) for n, o in mate.items()}
                alone.append(self._alone(mate, **how))
        rows = torch.cat([row for row, _ in alone])
        if len(rows) > 1:
            self._refuse_unlike(entries, rows, **how)
        answers = next((answers for _, answers in alone if answers), [])
        return rows[places], answers

    def _together(
        self, entries: Mapping[str, Tensor], num: int, **how: Any
    ) -> tuple[Tensor, list[Any]] | None:
        """Run a part once for samples; None where it is not known whose an entry is."""
        packing, cuts, alone = self.row.packing, self._cuts, list[Any]()
        assert packing is not None
        looked_at = cuts.next_place(num)
        try:
            for place, one in enumerate(_singles(entries, num)):
                step = cuts.note if place == looked_at else cuts.stop
                with self._running_part(step, **how):
                    alone.append(self._run(one, first=0, hidden=None, **how))
            with self._running_part(cuts.run_known, **how):
                answers = self._run(entries, first=0, hidden=None, **how)
        except _LeftOutError:
            return None
        if answers == [None]:
            return None
        rows = torch.cat([packing.packed([one], 1) for one in cuts.cut(answers[0])])
        own = packing.packed(alone[looked_at], 1)
        pair = (packing.tensors(one) for one in (own, rows[looked_at : looked_at + 1]))
        self._refuse_others(zip(*pair, strict=True))
        return rows, answers

    @contextmanager
    def _running_part(
        self, step: Callable[..., Any], *, training: bool, **_: Any
    ) -> Iterator[None]:
        """Have a part's forward run so within the block, where its cuts may be known."""
        if not (training or self._cuts.is_off):
            self._run_part = step
        try:
            yield
        finally:
            self._run_part = _run_plainly

    def _mate_of(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return another sample of the same shape, (1, ...), if one is at hand."""
        for place in range(len(next(iter(self._example.values())))):
            mate = {n: one[place : place + 1] for n, one in self._example.items() if n in entries}
            pairs = [(one, entries[name].to(one.device)) for name, one in mate.items()]
            is_another = not all(torch.equal(one, other) for one, other in pairs)
            if is_another and all(one.shape == other.shape for one, other in pairs):
                return mate
        return None

    def _alone(self, entries: Mapping[str, Tensor], **how: Any) -> tuple[Tensor, list[Any]]:
        packing = self.row.packing
        assert packing is not None
        try:
            answers = self._run(entries, first=0, hidden=None, **how)
        except _LeftOutError:  # As it has nothing for a part, which its mates show.
            return packing.of_none(next(self._model.parameters()).device), []
        return packing.packed(answers, 1), answers

    def _refuse_unlike(self, entries: Mapping[str, Tensor], rows: Tensor, **how: Any) -> None:
        """Raise an error where samples together have other entries than each of them alone."""
        packing = self.row.packing
        assert packing is not None
        if packing.lacks(rows):
            return
        known = packing.tensors(rows)
        try:
            with self._running_part(self._cuts.run_followed, **how):
                answers = self._run(entries, first=0, hidden=None, **how)
            together = [one for one in tree_leaves(answers) if isinstance(one, Tensor)]
        except _LeftOutError:
            together = [one[:0] for one in known]
        self._refuse_others(zip(known, together, strict=True))
        self._cuts.learn(packing.counts(rows))

    def _refuse_others(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        if any(differ(one, other, self._task.computes_in) for one, other in pairs):
            raise UnlikeAnswerError(
                f"{self.row.name} return other entries for samples of one batch than for each of "
                "these samples alone, or in another order; leave them out of parts="
            )

    def _reached(self, answers: list[Any], last: int, num: int) -> Tensor:
        if self.row.packing is not None:
            return self.row.packing.packed(answers, num)
        return self._samples_first(self.row.calls[last - 1].hidden_out(answers[-1]))

    def _given(
        self, name: str, entries: Mapping[str, Tensor], num: int, device: torch.device
    ) -> Tensor:
        if name in entries:
            return entries[name].to(device)
        like = self._example[name]
        nan = torch.full((), torch.nan, dtype=like.dtype, device=device)
        return nan.expand(num, *like.shape[1:])

    def _samples_first(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(0, 1) if self.row.samples_at else hidden

    def _replaced(
        self, first: int, last: int, hidden: Tensor | None, answers: list[Any]
    ) -> AbstractContextManager[None]:
        """Have the blocks' `forward` do their part meanwhile."""
        frozen, steps = self.row.frozen(last), list[Callable[..., Any]]()
        if self.row.packing is not None:  # In the order in which they are called.
            answers.extend([None] * len(frozen))
        for index, block in enumerate(frozen):
            if index < first:
                rows = self._samples_first(hidden) if hidden is not None else None
                step = self._handing_on(index, rows if index == first - 1 else None)
            else:
                step = self._running(index, block.forward, answers, is_last=index == last - 1)
            steps.append(torch.compiler.disable(step))
        return replaced(frozen, steps)

    def _handing_on(self, index: int, rows: Tensor | None) -> Callable[..., Any]:
        call = self.row.calls[index]

        def hand_on(*args: Any, **kwargs: Any) -> Any:
            return call.answered(call.hidden_in((args, kwargs)) if rows is None else rows)

        return hand_on

    def _running(
        self, index: int, run: Callable[..., Any], answers: list[Any], *, is_last: bool
    ) -> Callable[..., Any]:
        def run_it(*args: Any, **kwargs: Any) -> Any:
            answers.append(run(*args, **kwargs))
            if is_last:
                raise Reached
            return answers[-1]

        def run_part(*args: Any, **kwargs: Any) -> Any:
            device = next(self._model.parameters()).device
            self.row.calls[index].computes_in = autocast_dtype(device.type)
            before = random_state(device)
            answers[index] = self._run_part(run, *args, **kwargs)
            self.draws |= random_state(device) != before
            if all(one is not None for one in answers):
                raise Reached
            # The model goes on, and may write into what it is given.
            answer, answers[index] = (
                answers[index],
                tree_map_only(Tensor, Tensor.clone, answers[index]),
            )
            return answer

        return run_it if self.row.packing is None else run_part

"""Say how a loop calls its model, and recognise a forward for which there are rows.

the loop gives the model                              the forward
all entries that the rows are of, as they were        may use their rows
some samples of these, or several batches'            may use these samples' rows
others, changed ones, or something beside             runs from its start

Arguments that have the default's value are as good as absent. Targets and a few others are known
to change nothing below the last block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipetransformer.loop.batch_entry import BatchEntry, Mark
from pipetransformer.model import TARGETS, names_of, unwrapped

_HARMLESS = ("return_dict", "num_items_in_batch", "logits_to_keep", "fused_lm_head")
"""Arguments that change nothing below the last block; the last one is TRL's."""

_OUTPUTS = ("output_hidden_states", "output_attentions")
"""Flags that ask for what frozen blocks return, which is not at hand."""

_OFF = ("use_cache", *_OUTPUTS)
"""Flags that leave hidden states alone where they are off."""


@final
@dataclass(frozen=True)
class LoopCall:
    """Say what a loop gives its model.

    Args:
        parameters: by an entry's name, the parameter that is given it.
        constants: other arguments that are not the default's, the same in all forwards.
    """

    parameters: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)


def guessed_call(model: nn.Module, names: Sequence[str]) -> LoopCall | None:
    """Guess what a loop gives its model of a batch's entries; None where names say nothing."""
    takes = names_of(model).inputs
    if known := {name: name for name in takes if name in names}:
        return LoopCall(known)
    if names[0] == "0" and len(names) <= 2:  # An input, and maybe a label.
        return LoopCall({"0": takes[0]})
    return None


@final
@dataclass(eq=False)
class RowBatch:
    """Hold a batch's samples and rows. Entries of the batch hold it as long as they live.

    Args:
        number: tells it apart from all others.
        ids: (B,) int64, the samples; `epoch` is that in which they were asked for.
        depth: number of blocks that the rows have passed; 0 without rows.
        rows: (B, ...), what the last frozen block returns; None without any.
        inputs: by parameters; of those that were not read an example, (N, ...).
        not_read: names of these.
        call: whose parameters these are.
    """

    number: int
    ids: Tensor
    epoch: int
    depth: int
    rows: Tensor | None
    inputs: Mapping[str, Tensor]
    not_read: frozenset[str]
    call: LoopCall
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        places = torch.arange(len(self.ids))
        self.table = torch.stack([torch.full_like(places, self.number), places], dim=1)

    def entries(self) -> dict[str, BatchEntry]:
        """Return the inputs as a loop is given them, by parameters."""
        names = {parameter: name for name, parameter in self.call.parameters.items()}
        return {one: self.entry(names[one], value, one) for one, value in self.inputs.items()}

    def entry(self, name: str, value: Tensor, parameter: str = "") -> BatchEntry:
        """Return an entry of the batch under its name in the loader's batches."""
        mark = Mark(name, {self.number: self}, self.table)
        if parameter in self.not_read:
            return BatchEntry.unread(mark, value.shape[1:], value.dtype, value.device)
        return BatchEntry.read(mark, value)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.inputs[name].dtype


@final
class ForwardCall:
    """Know a model's signature, and what of it a loop gives.

    Args:
        call: None where that is yet to be learnt.
    """

    def __init__(self, model: nn.Module, call: LoopCall | None = None) -> None:
        self._call = call or LoopCall({})
        own = unwrapped(model)
        self._config = getattr(own, "config", None)
        kinds = inspect.Parameter
        parameters = inspect.signature(own.forward).parameters.values()
        named = [
            one
            for one in parameters
            if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        ]
        self.parameters = tuple(one.name for one in named)
        self._defaults = {one.name: one.default for one in named}
        self._ignored = frozenset((*TARGETS, *_HARMLESS))

    def learned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoopCall | None:
        """Return what a forward was given of a batch; None where that is no call of a loop."""
        parameters, constants = dict[str, str](), dict[str, Any]()
        for name, value in self._given(args, kwargs):
            if name in self._ignored or name == "":
                continue
            if isinstance(value, BatchEntry):
                if (mark := value.mark()) is None or mark.name in parameters:
                    return None
                parameters[mark.name] = name
            elif not self._is_default(name, value):
                if not isinstance(value, (bool, int, float, str, type(None))):
                    return None
                constants[name] = value
        return LoopCall(parameters, constants) if parameters else None

    def mark_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mark | None:
        """Return which rows a forward is of; None where it must run from its start."""
        marks: dict[str, Mark] = {}
        constants = set(self._call.constants)
        for name, value in self._given(args, kwargs):
            if name in self._ignored:
                continue
            if not isinstance(value, BatchEntry):
                if name in constants and value == self._call.constants[name]:
                    constants.discard(name)
                elif name in constants or not self._is_default(name, value):
                    return None
                continue
            mark = value.mark()
            if mark is None or self._call.parameters.get(mark.name) != name:
                return None
            if not all(_is_alike(value, batch.dtype_of(name)) for batch in mark.batches.values()):
                return None
            marks[name] = mark
        first = next(iter(marks.values()), None)
        if (
            first is None
            or constants
            or not all(first.holds_same_rows(one) for one in marks.values())
        ):
            return None
        # Rows were computed of all inputs that a batch has.
        complete = all(marks.keys() == batch.inputs.keys() for batch in first.batches.values())
        return first if complete else None

    def _given(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for place, value in enumerate(args):
            yield self.parameters[place] if place < len(self.parameters) else "", value
        yield from kwargs.items()

    def _is_default(self, name: str, value: Any) -> bool:
        default = self._defaults.get(name)  # What `**kwargs` takes is None where it is absent.
        if value is default or (value is False and (name in _OFF or name not in self._defaults)):
            return True
        return type(value) is type(default) and not isinstance(value, Tensor) and value == default

    def _wants_more(self) -> bool:
        return any(getattr(self._config, name, None) is True for name in _OUTPUTS)


def _is_alike(entry: BatchEntry, dtype: torch.dtype) -> bool:
    """Return whether an entry has the values that rows were computed of, or these in less bits."""
    return entry.dtype == dtype or (entry.is_floating_point() and dtype.is_floating_point)


def holds_entries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward is given anything of a batch of ours."""
    return any(isinstance(one, BatchEntry) for one in tree_leaves((args, dict(kwargs))))

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from pipetransformer.loop.batches import DERIVED, BatchEntry, Mark, plain
from pipetransformer.loop.forward.model_hooks import ModelHook
from pipetransformer.model import ROUTERS, TARGETS, names_of, unwrapped

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
        positional: parameters that are given by position, in their order.
        targets: by an entry's name, the target of the loss that the forward is given, too.
    """

    parameters: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[str, ...] = ()
    targets: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Return the targets without which the forward does not run, so that they are inputs."""
        return frozenset(self.parameters.values()) & frozenset(TARGETS)

    def has_rows_of(self, other: LoopCall) -> bool:
        """Return whether the same rows serve both."""
        return self.parameters == other.parameters and self.constants == other.constants

    def is_column_beside(self, other: LoopCall) -> bool:
        """Return whether the model is given other entries of a batch in the same way."""
        mine, others = ({*one.parameters.values()} for one in (self, other))
        known = self.constants == other.constants and self.targets == other.targets
        return known and mine == others and self.parameters != other.parameters

    def arguments(self, named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as the loop gives them."""
        given = {**named, **self.constants}
        args = tuple(given.pop(name) for name in self.positional)
        return args, given


def guessed_call(model: nn.Module, names: Sequence[str]) -> LoopCall | None:
    """Guess what a loop gives its model of a batch's entries; None where names say nothing."""
    own = names_of(model)
    if not own.inputs and _takes_any_name(model):
        return None
    if not own.inputs:
        raise ValueError(
            f"the forward of this {type(unwrapped(model)).__name__} names nothing that it is "
            "given: a function of *args has taken its place. Give `forward` named parameters, or "
            "wrap it behind `attach`"
        )
    call = None
    if known := {name: name for name in own.inputs if name in names}:
        call = LoopCall(known, targets={n: n for n in own.targets if n in names})
    elif names[0] == "0" and len(names) <= 2:  # An input, and maybe a label.
        call = LoopCall({"0": own.inputs[0]}, positional=own.inputs[:1])
    needed = _needed(model) - {*own.targets}
    return call if call is not None and needed <= {*call.parameters.values()} else None


def _needed(model: nn.Module) -> set[str]:
    """Return the parameters that have no default."""
    return {one.name for one in _signature(model) if one.default is inspect.Parameter.empty}


def _takes_any_name(model: nn.Module) -> bool:
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _signature(model: nn.Module) -> list[inspect.Parameter]:
    kinds = inspect.Parameter
    named = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    return [one for one in parameters if one.kind in named]


@final
@dataclass(eq=False)
class RowBatch:
    """Hold a batch's samples and rows. Entries of the batch hold it as long as they live.

    Args:
        number: tells it apart from all others, but those of the same batch's other columns.
        ids: (B,) int64, the samples; `epoch` is that in which they were asked for.
        num_rows: of each entry; some samples have several.
        depth: number of blocks that the rows have passed; 0 without rows.
        rows: (R, ...), what the last frozen block returns; None without any.
        inputs: by parameters; of those that were not read an example, (N, ...).
        not_read: names of these.
        call: whose parameters these are.
        stamp: of the blocks that have made the rows.
        place: of the loop whose samples these are.
        read: returns what its loader has for them.
        bundles: names of entries that have several rows for each of the batch's.
    """

    number: int
    ids: Tensor
    num_rows: int
    epoch: int
    depth: int
    rows: Tensor | None
    inputs: Mapping[str, Tensor]
    not_read: frozenset[str]
    call: LoopCall
    stamp: int
    place: object
    read: Callable[[RowBatch], Mapping[str, Tensor]]
    bundles: frozenset[str] = frozenset()
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.table = _table(self.number, self.num_rows)

    def entries(self) -> dict[str, BatchEntry]:
        """Return the inputs as a loop is given them, by parameters."""
        names = {parameter: name for name, parameter in self.call.parameters.items()}
        return {one: self.entry(names[one], value, one) for one, value in self.inputs.items()}

    def entry(self, name: str, value: Tensor, parameter: str = "") -> BatchEntry:
        """Return an entry of the batch under its name in the loader's batches."""
        # What is no input of this column may have other numbers of rows.
        is_other = not parameter and len(value) != self.num_rows
        table = _table(self.number, len(value)) if is_other else self.table
        mark = Mark(name, {self.number: self}, table, name in self.bundles)
        if parameter in self.not_read:
            return BatchEntry.unread(mark, value.shape[1:], value.dtype, value.device)
        return BatchEntry.read(mark, value)

    def has_as(self, parameter: str, entry: BatchEntry) -> bool:
        """Return whether an entry has the values that rows are made of, or these in less bits."""
        own = self.inputs.get(parameter)
        if own is None or own.dtype == entry.dtype:
            return True
        return own.is_floating_point() and entry.is_floating_point()


def _table(number: int, num_rows: int) -> Tensor:
    return _places(num_rows) + torch.tensor([number, 0])


@lru_cache(maxsize=16)
def _places(num_rows: int) -> Tensor:
    places = torch.arange(num_rows)
    return torch.stack([torch.zeros_like(places), places], dim=1)


@final
class ForwardCall:
    """Know a model's signature, and what of it a loop gives.

    Args:
        calls: one for each column of the loader's batches; none where that is yet to be learnt.
        of_parts: whether rows are of parts, not of blocks.
        of_routers: whether rows hold the routers' logits, too.
        of_joined: whether samples are joined along their tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: tuple[LoopCall, ...] = (),
        *,
        of_parts: bool = False,
        of_routers: bool = False,
        of_joined: bool = False,
    ) -> None:
        self.calls = calls
        self._unheld = _OUTPUTS if of_parts or of_routers else (*_OUTPUTS, ROUTERS)
        self._config = getattr(unwrapped(model), "config", None)
        named = _signature(model)
        self.parameters = tuple(one.name for one in named)
        self._defaults = {one.name: one.default for one in named}
        needed = {name for call in calls for name in call.needs}
        # A part may be told of it.
        needed |= {"return_dict"} if of_parts else set()
        derived = DERIVED if of_joined else ()
        self._ignored = frozenset((*TARGETS, *_HARMLESS, *derived)) - needed
        # What is frozen is known to do without these alone.
        harmless = {target for call in calls for target in call.targets.values()}
        is_unknown = bool(calls) and self._may_read_targets(model, of_parts=of_parts)
        self._unproven = frozenset({*TARGETS} - harmless if is_unknown else ())

    def learned(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LoopCall | None:
        """Return what a forward was given of a batch; None where that is no call of a loop."""
        parameters, constants, targets = dict[str, str](), dict[str, Any](), dict[str, str]()
        positional: list[str] = []
        for place, (name, value) in enumerate(self._given(args, kwargs)):
            if name in self._ignored or name == "":
                if name in TARGETS and isinstance(value, BatchEntry):
                    targets[name if (mark := value.mark()) is None else mark.name] = name
                continue
            # What is a default's value may as well be left out, and what follows it be named.
            if place == len(positional) < len(args) and not self._is_default(name, value):
                positional.append(name)
            if isinstance(value, BatchEntry):
                if (mark := value.mark()) is None or mark.name in parameters:
                    return None
                parameters[mark.name] = name
            elif not self._is_default(name, value):
                if not isinstance(value, (bool, int, float, str, type(None))):
                    return None
                constants[name] = value
        if not parameters:
            return None
        return LoopCall(parameters, constants, tuple(positional), targets)

    def rows_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Mark, LoopCall] | None:
        """Return which rows a forward is of, as what call; None where it runs from its start."""
        marks: dict[str, Mark] = {}
        due = self.calls[0].constants  # They are the same in all columns.
        constants = set(due)
        for name, value in self._given(args, kwargs):
            if name in self._ignored and not (
                name in self._unproven and isinstance(value, Tensor)
            ):
                continue
            if not isinstance(value, BatchEntry):
                if name in constants and value == due[name]:
                    constants.discard(name)
                elif name in constants or not self._is_default(name, value):
                    return None
                continue
            mark = value.mark()
            if mark is None:
                return None
            if not all(batch.has_as(name, value) for batch in mark.batches.values()):
                return None
            marks[name] = mark
        first = next(iter(marks.values()), None)
        if first is None or not first.batches or constants or self._wants_more():
            return None
        if not all(first.holds_same_rows(one) for one in marks.values()):
            return None
        # Rows are computed of all that a call gives.
        given = {(mark.name, name) for name, mark in marks.items()}
        call = next((one for one in self.calls if {*one.parameters.items()} == given), None)
        return None if call is None else (first, call)

    def gives_lists(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a target is no tensor, but a list of what each sample has."""
        given = self._given(args, kwargs)
        return any(name in TARGETS and isinstance(one, (list, tuple)) for name, one in given)

    def _given(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for place, value in enumerate(args):
            yield self.parameters[place] if place < len(self.parameters) else "", value
        yield from kwargs.items()

    def _is_default(self, name: str, value: Any) -> bool:
        default = self._defaults.get(name)  # What `**kwargs` takes is None where it is absent.
        if value is default or (value is False and name in _OFF):
            return True
        return type(value) is type(default) and not isinstance(value, Tensor) and value == default

    def _may_read_targets(self, model: nn.Module, *, of_parts: bool) -> bool:
        """Return whether targets may be more than what a loss is compared with."""
        # In transformers a decoder's inputs are made of labels, and blocks do without them. BLIP
        # that answers questions has a decoder, too, and is not said to be such a model.
        has_decoder = getattr(self._config, "is_encoder_decoder", True)
        has_decoder |= any(name.startswith("decoder_") for name in self.parameters)
        own = type(getattr(model, "base_model", unwrapped(model))).__module__
        return has_decoder if of_parts else not own.startswith(("transformers.", "peft."))

    def _wants_more(self) -> bool:
        return any(getattr(self._config, name, None) is True for name in self._unheld)


def holds_entries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward is given anything of a batch of ours."""
    flat = (*args, *kwargs.values())
    # torch's way through containers takes longer than all else here, and most have none.
    if any(isinstance(one, BatchEntry) for one in flat):
        return True
    return _has_containers(flat) and any(isinstance(x, BatchEntry) for x in tree_leaves(flat))


def with_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], value_of: Callable[[BatchEntry], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with something else in the place of entries."""
    if _has_containers((*args, *kwargs.values())):
        given: tuple[tuple[Any, ...], dict[str, Any]]
        given = tree_map_only(BatchEntry, value_of, (args, kwargs))
        return given
    return (
        tuple(value_of(one) if isinstance(one, BatchEntry) else one for one in args),
        {n: value_of(one) if isinstance(one, BatchEntry) else one for n, one in kwargs.items()},
    )


def _has_containers(flat: Sequence[Any]) -> bool:
    return not all(isinstance(one, (Tensor, *_SINGLE)) for one in flat)


_SINGLE = (bool, int, float, str, type(None))


@contextmanager
def learning(
    model: nn.Module, begin: Callable[[LoopCall], None], *, of_parts: bool
) -> Iterator[None]:
    """Have the first forward within the block that is given entries say how it is called."""
    signature, within = ForwardCall(model, of_parts=of_parts), list[RemovableHandle]()

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = signature.learned(args, kwargs) if holds_entries(args, kwargs) else None
        if call is not None:
            handle.remove()
            begin(call)
        elif any(isinstance(one, Mapping) for one in (*args, *kwargs.values())) and not within:
            within.extend(_refusing_whole(model))
            return None
        elif model.training and torch.is_grad_enabled():
            raise ValueError(
                "the first forward says what the model is given of a batch, and freezes; but this "
                "one is given nothing of it, or changed values. Change samples in the data set or "
                "collate_fn, or give batches the names of the model's parameters"
            )
        return with_plain(args, kwargs, plain)

    hook = ModelHook(torch.compiler.disable(look))
    handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        for one in (handle, *within):
            one.remove()


def _refusing_whole(model: nn.Module) -> Iterator[RemovableHandle]:
    """Have the part be named that is given entries, where the whole is given a mapping."""

    def look(name: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if holds_entries(args, kwargs) and ForwardCall(part).learned(args, kwargs) is not None:
            raise ValueError(
                f"this {type(model).__name__} is given a mapping, and hands what is in it to its "
                f"part {name!r}: attach that, model.get_submodule({name!r}), in the model's place"
            )

    for name, part in model.named_modules():
        if name and any(isinstance(one, nn.ModuleList) for one in part.modules()):
            hook = ModelHook(torch.compiler.disable(partial(look, name)))
            yield part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

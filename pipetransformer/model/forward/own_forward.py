"""Run a model's own forward in parts: up to its blocks, a block, behind its blocks.

The forward is run whole each time, by a skeleton of the model: the same Python, in which blocks
are stand-ins that hand the hidden state on.

    part         below the blocks   blocks      behind them
    below        the model's own    leaves at the last, and keeps what blocks were given
    arguments    hollow             the same
    above        hollow             the last hands on what came         the model's own

Hollow weights are zeros that take no memory. They have the right shapes, so masks, positions and
rotations come out right on ranks that do not hold the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from pipetransformer.model.forward.recording import Arguments, Row

Entries: TypeAlias = Mapping[str, Tensor]

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Left(BaseException):
    """Leave a model's forward; no model's own `except Exception` catches it."""


@dataclass
class _Slot:
    """Name a skeleton's place for a tensor, and the model's, which transitions fill anew.

    Args:
        fills: when the tensor is hollow: "always", "never", or where the model's was "released".
        constant: a buffer's values, in the place of zeros.
    """

    table: dict[str, Any]
    source: Mapping[str, Tensor | None]
    name: str
    fills: Literal["always", "never", "released"]
    constant: Tensor | None = None

    def fill(self, device: torch.device) -> None:
        """Give the skeleton the model's tensor, or a hollow one on a device."""
        real = self.source[self.name]
        assert real is not None
        if self.fills == "never" or (self.fills == "released" and not real.is_meta):
            self.table[self.name] = real
            return
        held = self.table[self.name]
        if held is real or held.device != device or held.dtype != real.dtype:
            self.table[self.name] = (
                torch.zeros((), dtype=real.dtype, device=device).expand(real.shape)
                if self.constant is None
                else self.constant.to(device, real.dtype)
            )


@final
class Skeleton:
    """Hold a model's modules around its blocks once more: copies without tensors of their own.

    Modules that hold no tensor to copy and no block are the model's own.

    Args:
        is_hollow: whether weights that are read below the blocks are zeros here; buffers keep
            their values.
        last: a module that is a stand-in, too, and is visited after all blocks.
    """

    def __init__(
        self, model: nn.Module, row: Row, *, is_hollow: bool, last: nn.Module | None = None
    ) -> None:
        self._row, self._is_hollow = row, is_hollow
        self._copied = row.below if is_hollow else frozenset()
        self._name_of = {id(tensor): name for name, tensor in _all_tensors(model)}
        stand_ins = (*row.blocks, *(() if last is None else (last,)))
        self._index_of = {id(block): index for index, block in enumerate(stand_ins)}
        self._slots: list[_Slot] = []
        self._copies: dict[int, nn.Module] = {}
        self._around: set[nn.Module] = set()
        self.visit: Callable[[int, Arguments], Any] | None = None
        self.model = self._copy(model)

    def prepare(self, device: torch.device, *, training: bool) -> None:
        """Have its tensors on a device, and itself in train or eval mode."""
        for slot in self._slots:
            slot.fill(device)
        for copy in self._copies.values():
            # Hollow layers need drop nothing; what holds blocks may look at its mode.
            copy.training = training and copy in self._around

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        is_block = id(module) in self._index_of
        if not is_block and not self._must_copy(module):
            return module
        kind = _stand_in(type(module)) if is_block else type(module)
        if isinstance(module, _Convolution) and self._is_all_hollow(module):
            kind = _of_one_sample(kind)
        copy = kind.__new__(kind)
        vars(copy).update(vars(module))
        vars(copy).update({name: type(vars(module)[name])() for name in _HOOKS})
        vars(copy)["_compiled_call_impl"] = None
        if has_own_forward(module):
            # Bound as it is, it would run the model itself.
            vars(copy)["forward"] = MethodType(vars(module)["forward"].__func__, copy)
        if is_block:
            vars(copy)["_skeleton"] = self, self._index_of[id(module)]
            return copy
        self._copies[id(module)] = copy
        if self._holds_block(module):
            self._around.add(copy)
        for table in ("_parameters", "_buffers"):
            source = getattr(module, table)
            vars(copy)[table] = own = dict(source)
            for name, tensor in source.items():
                if tensor is not None:
                    # What is kept of a rotation's frequencies, say, serves on all ranks.
                    constant = tensor.detach().clone() if table == "_buffers" else None
                    fills = self._fills(module, self._name_of[id(tensor)])
                    self._slots.append(_Slot(own, source, name, fills, constant))
        vars(copy)["_modules"] = {
            name: None if child is None else self._copy(child)
            for name, child in module._modules.items()
        }
        return copy

    def _must_copy(self, module: nn.Module) -> bool:
        only_below = module in self._row.called_below and module not in self._row.called_above
        return (
            self._holds_block(module)
            or (self._is_hollow and only_below)
            or any(self._name_of[id(tensor)] in self._copied for _, tensor in _all_tensors(module))
        )

    def _is_all_hollow(self, module: nn.Module) -> bool:
        names = {self._name_of[id(tensor)] for _, tensor in _all_tensors(module)}
        return self._is_hollow and names <= self._copied - self._row.above - self._row.learned

    def _holds_block(self, module: nn.Module) -> bool:
        return any(id(part) in self._index_of for part in module.modules())

    def _fills(self, module: nn.Module, name: str) -> Literal["always", "never", "released"]:
        row = self._row
        if name not in self._copied or name in row.learned:
            return "never"
        # A tied head has a module of its own, or reads the embedding's attribute.
        is_apart = module in row.called_below and module not in row.called_above
        has_other = any(
            name in {self._name_of[id(t)] for _, t in _all_tensors(other)}
            for other in row.called_above
        )
        return "always" if name not in row.above or (is_apart and has_other) else "released"


_Convolution = nn.modules.conv._ConvNd


def _of_one_sample(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that computes one sample for all: with hollow weights they are equal."""

    def call(self: nn.Module, images: Tensor) -> Tensor:
        one: Tensor = kind.__call__(self, images[:1])
        return one.expand(len(images), *one.shape[1:])

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_STAND_INS: dict[type[nn.Module], type[nn.Module]] = {}


def _stand_in(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a block's class whose calls go to the skeleton: attributes are those of the block."""
    if kind in _STAND_INS:
        return _STAND_INS[kind]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        skeleton, index = vars(self)["_skeleton"]
        return skeleton.visit(index, (args, kwargs))

    # Not by replacing `forward`: hooks, checkpointing and compiled code act within `__call__`.
    methods = {"__call__": call, "__module__": kind.__module__}
    return _STAND_INS.setdefault(kind, type(kind.__name__, (kind,), methods))


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a method was set on the object in its class's place, as Liger's is."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and forward.__self__ is module


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers under their first names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@final
class CutForward:
    """Run the parts of a model's own forward.

    Args:
        inputs: entries of a batch that the forward takes, the main one first.
        keywords: what the forward is given beside these.
        example: entries whose shape is all that blocks and head use, such as images. Only the
            first part is given them, and all samples must have the example's shape.
    """

    def __init__(
        self,
        model: nn.Module,
        row: Row,
        *,
        inputs: tuple[str, ...],
        keywords: Mapping[str, Any],
        example: Entries,
    ) -> None:
        self.row, self.inputs, self._keywords = row, inputs, dict(keywords)
        self.shapes = {name: tuple(entry.shape[1:]) for name, entry in example.items()}
        self._below = Skeleton(model, row, is_hollow=False)
        self._model = model
        self._above = Skeleton(model, row, is_hollow=True)
        self._headless: Skeleton | None = None
        self._kept: _Kept | None = None

    def below(self, entries: Entries, *, training: bool) -> Tensor:
        """Return the hidden state that the first block takes."""
        for name, shape in self.shapes.items():
            if tuple(entries[name].shape[1:]) != shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(entries[name].shape)}, but the first samples had "
                    f"{('N', *shape)}: give all samples one shape"
                )
        visited = self._visited(self._below, entries, training=training)
        hidden = self._samples_first(self.row.calls[0].hidden_in(visited[0]))
        self._keep(visited, self._sides(entries), hidden, training=training)
        return hidden

    def _samples_first(self, hidden: Tensor) -> Tensor:
        """Exchange the model's order of dimensions and that between sublayers; either way."""
        return hidden.transpose(0, 1) if self.row.samples_at else hidden

    def block(self, index: int, hidden: Tensor, entries: Entries, *, training: bool) -> Tensor:
        """Run a block on a hidden state, with what the forward would give it beside that."""
        own = self.arguments(index, hidden, entries, training=training)
        call = self.row.calls[index]
        args, kwargs = call.given(own, self._samples_first(hidden))
        return self._samples_first(call.hidden_out(self.row.blocks[index](*args, **kwargs)))

    def above(
        self,
        hidden: Tensor,
        entries: Entries,
        *,
        training: bool,
        head: Callable[..., Tensor] | None = None,
    ) -> Any:
        """Return the model's answer, where its last block returns this hidden state.

        Args:
            head: what is called in the place of the module that `end_at` was given.
        """
        last, own = len(self.row.blocks) - 1, self._samples_first(hidden)
        skeleton = self._above if head is None else self._headless
        assert skeleton is not None, "end_at comes first"

        def visit(index: int, given: Arguments) -> Any:
            if index > last:
                assert head is not None
                return head(*given[0], **given[1])
            call = self.row.calls[index]
            return call.answered(own if index == last else call.hidden_in(given))

        given = self._given(entries, hidden)
        return self._run(skeleton, visit, given, hidden.device, training=training)

    def end_at(self, module: nn.Module) -> None:
        """Make a module's calls behind the blocks known to `above` and `headless`."""
        self._headless = Skeleton(self._model, self.row, is_hollow=True, last=module)

    def headless(self, hidden: Tensor, entries: Entries, *, training: bool) -> Tensor:
        """Return what that module would be given, and run nothing behind it."""
        got: list[Tensor] = []

        def leave(given: Tensor) -> Tensor:
            got.append(given)
            raise Left

        try:
            self.above(hidden, entries, training=training, head=leave)
        except Left:
            return got[0]
        raise RuntimeError("the model's forward has left out its head")

    def arguments(
        self, index: int, hidden: Tensor, entries: Entries, *, training: bool
    ) -> Arguments:
        """Return what the forward gives a block, but for the hidden state."""
        sides = self._sides(entries)
        kept = self._kept
        if kept is not None and kept.is_of(sides, hidden, training):
            return kept.arguments[index]
        given = self._given(entries, hidden)
        devices = [hidden.device] if hidden.is_cuda else []
        # Hollow layers may draw for their dropout: blocks must not notice who has asked for them.
        with torch.random.fork_rng(devices):
            visited = self._visited(self._above, given, training=training)
        return self._keep(visited, sides, hidden, training=training)[index]

    def _keep(
        self, visited: list[Arguments], sides: Entries, hidden: Tensor, *, training: bool
    ) -> list[Arguments]:
        """Return what blocks were given, without hidden states, and keep it for those to come."""
        own = [c.given(one, None) for c, one in zip(self.row.calls, visited, strict=True)]
        # Each block's backward goes down to what is learned by itself.
        if not self.row.learned:
            self._kept = _Kept(sides, _state(hidden.device, len(hidden), training), own)
        return own

    def forget(self) -> None:
        """Let go of the last micro-batch."""
        self._kept = None

    def _sides(self, entries: Entries) -> dict[str, Tensor]:
        return {n: entries[n] for n in self.inputs if n in entries and n not in self.shapes}

    def _given(self, entries: Entries, hidden: Tensor) -> dict[str, Tensor]:
        """Return the forward's inputs, in whose place of some only their shape is known."""
        given = self._sides(entries)
        for name, shape in self.shapes.items():
            zero = torch.zeros((), dtype=hidden.dtype, device=hidden.device)
            given[name] = zero.expand(len(hidden), *shape)
        return given

    def _visited(self, skeleton: Skeleton, entries: Entries, *, training: bool) -> list[Arguments]:
        """Run a forward up to its last block; return what blocks were given."""
        got: list[Arguments] = []
        last = len(self.row.blocks) - 1

        def visit(index: int, given: Arguments) -> Any:
            got.append(given)
            if index == last:
                raise Left
            call = self.row.calls[index]
            return call.answered(call.hidden_in(given))

        given = {name: entries[name] for name in self.inputs if name in entries}
        device = next(iter(given.values())).device
        try:
            self._run(skeleton, visit, given, device, training=training)
        except Left:
            return got
        raise RuntimeError("the model's forward has left out its last block")

    def _run(
        self,
        skeleton: Skeleton,
        visit: Callable[[int, Arguments], Any],
        given: Mapping[str, Tensor],
        device: torch.device,
        *,
        training: bool,
    ) -> Any:
        skeleton.prepare(device, training=training)
        skeleton.visit = visit
        try:
            return skeleton.model(**given, **self._keywords)
        finally:
            skeleton.visit = None


def _state(device: torch.device, num: int, training: bool) -> tuple[Any, ...]:
    kind = device.type
    # Of the meta device, on which plans are counted, autocast knows nothing.
    may_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if may_cast else None
    return device, num, training, cast, torch.is_inference_mode_enabled()


@dataclass(frozen=True)
class _Kept:
    """Keep blocks' arguments of the last micro-batch, for the blocks that follow."""

    sides: Mapping[str, Tensor]
    state: tuple[Any, ...]
    arguments: list[Arguments]

    def is_of(self, sides: Entries, hidden: Tensor, training: bool) -> bool:
        return (
            self.state == _state(hidden.device, len(hidden), training)
            and self.sides.keys() == sides.keys()
            and all(self.sides[name] is sides[name] for name in sides)
        )


def output_of(answer: Any) -> Tensor:
    """Return the tensor that a loss takes: a model's answer itself, or its logits."""
    if isinstance(answer, Tensor):
        return answer
    logits = getattr(answer, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    ends = [getattr(answer, name, None) for name in ("start_logits", "end_logits")]
    if all(isinstance(one, Tensor) for one in ends):
        return torch.stack([one for one in ends if isinstance(one, Tensor)], dim=-1)
    raise TypeError(
        f"the model's own forward returned a {type(answer).__name__}, in which no output is known"
    )

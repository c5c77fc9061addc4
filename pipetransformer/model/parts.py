"""Present a model of which modules are frozen, whatever they are, by how one forward ran.

    part      the modules, and frozen tensors that are read before them    layer 0
    rest      everything else; no tensors of it are named here             layer 1

A row is what the modules return for a sample, and nothing is known of them but that. So a part may
be a tower, a backbone, an encoder, or a model by itself: a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pipetransformer.model.general import ForwardFailedError
from pipetransformer.model.layered_model import LayeredModel, Sublayer, named_tensors
from pipetransformer.model.own_forward import Entries
from pipetransformer.model.recording import Arguments, Reads, Row, whole_in_mode


@final
@dataclass(frozen=True)
class _Answer:
    """Say what a part returned: tensors' shapes, without samples, and all that is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]


@final
@dataclass(frozen=True)
class Packing:
    """Put what parts return for samples into one tensor, (N, ...), and take it out again.

    A single tensor stays what it is. Several become bytes, (N, B), in the order of the parts.

    Args:
        answers: one for each part.
        names: of the parts, for errors.
    """

    answers: tuple[_Answer, ...]
    names: tuple[str, ...]

    @property
    def is_single(self) -> bool:
        return sum(len(one.shapes) for one in self.answers) == 1

    def packed(self, answers: Sequence[Any]) -> Tensor:
        """Return a row for each sample.

        Raises:
            ValueError: a part has returned something else than for the first samples.
        """
        tensors: list[Tensor] = []
        for known, name, answer in zip(self.answers, self.names, answers, strict=True):
            own = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]
            found = tuple((one.shape[1:], one.dtype) for one in own)
            if len(own) != len(known.shapes) or (not self.is_single and found != known.shapes):
                raise ValueError(
                    f"{name!r} returns {_spelled(found)} for some samples, and "
                    f"{_spelled(known.shapes)} for others; give all samples one shape"
                )
            tensors += own
        return self.joined(tensors)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return rows of the tensors of all answers."""
        if self.is_single:
            return tensors[0]
        flat = [one.detach().contiguous().reshape(len(one), -1) for one in tensors]
        return torch.cat([one.view(torch.uint8) for one in flat], dim=1)

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of all answers, from their rows."""
        if self.is_single:
            return [rows]
        shapes = [shape for answer in self.answers for shape in answer.shapes]
        pieces = rows.split([shape.numel() * dtype.itemsize for shape, dtype in shapes], dim=1)
        return [
            piece.contiguous().view(dtype).view(len(rows), *shape)
            for piece, (shape, dtype) in zip(pieces, shapes, strict=True)
        ]

    def unpacked(self, part: int, rows: Tensor) -> Any:
        """Return what a part has returned for samples, from their rows."""
        answer = self.answers[part]
        first = sum(len(one.shapes) for one in self.answers[:part])
        own = iter(self.tensors(rows)[first:])
        leaves = [next(own) if leaf is _TENSOR else leaf for leaf in answer.leaves]
        return tree_unflatten(leaves, answer.spec)


_TENSOR = object()
"""Where an answer has a tensor."""


def _spelled(shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{('N', *shape)} {dtype}" for shape, dtype in shapes) or "no tensor"


@final
@dataclass(frozen=True)
class PartCall:
    """Say of a part's call what a `BlockCall` says of a block's."""

    packing: Packing
    part: int

    def hidden_in(self, given: Arguments) -> Tensor:
        """Return the first tensor that a part was given, for its device."""
        return next(leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


@dataclass
class _Record:
    """Follow one forward: what parts were given and returned, and what was read before them."""

    parts: Mapping[str, nn.Module]
    order: list[str] = field(default_factory=list)
    answers: dict[str, tuple[list[Any], TreeSpec]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    below: set[nn.Module] = field(default_factory=set)
    above: set[nn.Module] = field(default_factory=set)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, part in self.parts.items():
                enter, leave = self._hooks(name)
                stack.callback(part.register_forward_pre_hook(enter).remove)
                stack.callback(part.register_forward_hook(leave).remove)
            stack.callback(register_module_forward_pre_hook(self._note_module).remove)
            stack.enter_context(Reads(self._note_read))
            yield

    @property
    def is_reached(self) -> bool:
        """Return whether all parts have answered."""
        return len(self.answers) == len(self.parts)

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: object) -> None:
            self.order.append(name)

        def leave(_: nn.Module, _args: object, answer: Any) -> None:
            self.answers[name] = tree_flatten(answer)  # A model may change it afterwards.

        return enter, leave

    def _note_module(self, module: nn.Module, _args: object) -> None:
        (self.above if self.is_reached else self.below).add(module)

    def _note_read(self, identity: int) -> None:
        if not self.is_reached:
            self.read.add(identity)


def present_parts(
    model: nn.Module,
    parts: Mapping[str, nn.Module],
    entries: Entries,
    run: Callable[[Entries], Any],
    *,
    beside: tuple[str, ...],
    varied: Collection[str] = (),
) -> LayeredModel:
    """Present a model whose parts are frozen, by what it does with a few samples.

    Args:
        parts: by name; modules of the model, or the model itself.
        entries: inputs of two samples or more, (N, ...) each.
        run: calls the model's forward.
        beside: entries that a batch has beside the inputs.
        varied: of all these, those whose samples have unequal shapes. Where parts do without them
            they are no inputs here, and rows hold nothing but what parts return.
    Raises:
        ValueError: a part is not called once, or does not return a row for each sample.
    """
    record, num = _Record(parts), len(next(iter(entries.values())))
    with torch.no_grad(), whole_in_mode(model, training=False):
        try:
            with record.listening():
                whole = tree_leaves(run(entries))
        except Exception as error:
            name = type(model).__name__
            raise ForwardFailedError(
                f"the forward of this {name} fails for two samples: {error}"
            ) from error
        _refuse_calls(record, model)
        answers = tuple(_answer_of(name, *record.answers[name], num) for name in parts)
        packing = Packing(answers, tuple(parts))
        leaves = [leaf for name in parts for leaf in record.answers[name][0]]
        rows = packing.joined([leaf for leaf in leaves if isinstance(leaf, Tensor)])

        def run_from_rows(given: Entries) -> Any:
            with served(tuple(parts.values()), lambda part: packing.unpacked(part, rows)):
                return run(given)

        unread = [name for name in entries if _is_unread(entries, name, run_from_rows, whole)]
        read = {
            name for name in varied if name in entries and _is_read(entries, name, run, record)
        }
        mask = _padding_mask(entries, read, rows, run, record, packing) if read else None
    inside = {module for part in parts.values() for module in part.modules()}
    frozen = {id(t): n for n, t in named_tensors(model).items() if not t.requires_grad}
    own = {id(t) for part in parts.values() for t in named_tensors(part).values()}
    below = frozenset(name for key, name in frozen.items() if key in record.read - own)
    row = Row(
        name=", ".join(map(repr, parts)),
        blocks=tuple(parts.values()),
        calls=tuple(PartCall(packing, index) for index in range(len(parts))),
        below=below,
        above=frozenset(),
        learned=frozenset(),
        called_below=frozenset(record.below - inside),
        called_above=frozenset(record.above - inside),
        samples_at=0,
        entrance=None,
        packing=packing,
    )
    # A module by itself is given what others read, too.
    if (varied and (mask or not read)) or any(part is model for part in row.blocks):
        own_inputs = tuple(name for name in entries if name not in varied or name in read)
        # Rows know their own lengths by their mask.
        return _layered(model, row, own_inputs, sides=(mask,) if mask else (), mask=mask)
    sides = tuple(name for name in entries if name not in unread)
    return _layered(model, row, tuple(entries), sides=sides, targets=beside)


def _layered(
    model: nn.Module,
    row: Row,
    inputs: tuple[str, ...],
    *,
    sides: tuple[str, ...] = (),
    targets: tuple[str, ...] = (),
    mask: str | None = None,
) -> LayeredModel:
    holder, tensors = nn.Module(), named_tensors(model)
    for index, part in enumerate(row.blocks):
        holder.add_module(f"part{index}", part)
    for index, name in enumerate(sorted(row.below)):
        tensor = tensors[name]
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(f"below{index}", tensor)
        else:
            holder.register_buffer(f"below{index}", tensor)
    held = {id(tensor) for tensor in named_tensors(holder).values()}
    layered = LayeredModel(
        model,
        [Sublayer("part", 0, holder), Sublayer("rest", 1, nn.Identity(), sides)],
        inputs=inputs,
        targets=targets,
        unused=[name for name, tensor in tensors.items() if id(tensor) not in held],
        padding_mask=mask,
        is_recorded=True,
    )
    layered.row = row
    return layered


def _refuse_calls(record: _Record, model: nn.Module) -> None:
    for name in record.parts:
        if (num := record.order.count(name)) != 1:
            raise ValueError(
                f"the forward of this {type(model).__name__} calls {name!r} "
                f"{f'{num} times' if num else 'not at all'} for two samples; a part must be "
                "called once in each forward: name the module around the calls, or leave it out"
            )


def _answer_of(name: str, leaves: list[Any], spec: TreeSpec, num_samples: int) -> _Answer:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError(f"{name!r} returns no tensor, and so nothing to keep in rows")
    for one in tensors:
        if one.shape[:1] != (num_samples,):
            raise ValueError(
                f"{name!r} returns a tensor of shape {tuple(one.shape)} for {num_samples} "
                "samples; rows need one entry a sample in its first dimension"
            )
    plain = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return _Answer(spec, plain, tuple((one.shape[1:], one.dtype) for one in tensors))


def _is_unread(
    entries: Entries, name: str, run: Callable[[Entries], Any], whole: list[Any]
) -> bool:
    """Return whether an entry's values are of no use where the parts' answers are known."""
    entry = entries[name]
    if not entry.is_floating_point() or entry.ndim < 3:
        return False
    nan = torch.full((), torch.nan, dtype=entry.dtype, device=entry.device)
    try:
        found = tree_leaves(run({**entries, name: nan.expand(entry.shape)}))
    except Exception:  # Any: it is looked at for something else than its shape.
        return False
    return len(found) == len(whole) and all(map(_are_equal, found, whole))


def _is_read(entries: Entries, name: str, run: Callable[[Entries], Any], record: _Record) -> bool:
    """Return whether parts return something else, or fail, where an entry has other values."""
    entry, answers = entries[name], record.answers
    others = [torch.zeros_like(entry), torch.ones_like(entry), entry.roll(1, 0)]
    for other in others:
        record.answers, record.order = {}, []
        try:
            with record.listening():
                run({**entries, name: other})
        except Exception:  # Any: behind the parts it is of no matter.
            if not record.is_reached:
                return True
        finally:
            found, record.answers = record.answers, answers
        now, known = _leaves(found), _leaves(answers)
        if len(now) != len(known) or not all(map(_are_equal, now, known)):
            return True
    return False


def _padding_mask(
    entries: Entries,
    read: set[str],
    rows: Tensor,
    run: Callable[[Entries], Any],
    record: _Record,
    packing: Packing,
) -> str | None:
    """Return the mask's name if nothing depends on what a part returns behind a text's end.

    The second half of the first sample is made padding, and its part of the row zeros.
    """
    given = entries.get(_MASK)
    if given is None or given.ndim != 2 or given.shape[1] < 2 or _MASK not in read:
        return None
    if not packing.is_single or rows.shape[:2] != given.shape:
        return None
    if any(entries[name].shape[:2] != given.shape for name in read):
        return None
    half = given.clone()
    half[0, given.shape[1] // 2 :] = 0
    record.answers, record.order = {}, []
    with record.listening():
        whole = tree_leaves(run({**entries, _MASK: half}))
    (own,) = (leaf for leaf in _leaves(record.answers) if isinstance(leaf, Tensor))
    cut = own.masked_fill((half == 0).view(*half.shape, *(1 for _ in own.shape[2:])), 0)
    parts = tuple(record.parts.values())
    with served(parts, lambda part: packing.unpacked(part, cut)):
        found = tree_leaves(run({**entries, _MASK: half}))
    # The part's own answer may be handed on to the loop, which is no matter of the model.
    pairs = [(a, b) for a, b in zip(found, whole, strict=True) if b is not own]
    return _MASK if all(_are_equal(a, b) for a, b in pairs) else None


_MASK = "attention_mask"


def _leaves(answers: Mapping[str, tuple[list[Any], TreeSpec]]) -> list[Any]:
    return [leaf for leaves, _ in answers.values() for leaf in leaves]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other)


@contextmanager
def served(parts: Sequence[nn.Module], answer: Callable[[int], Any]) -> Iterator[None]:
    """Have parts return other answers within the block, without running."""
    had = [vars(part).get("forward") for part in parts]
    try:
        for index, part in enumerate(parts):
            part.forward = lambda *_, index=index, **__: answer(index)
        yield
    finally:
        for part, own in zip(parts, had, strict=True):
            if own is None:
                del part.forward
            else:
                part.forward = own

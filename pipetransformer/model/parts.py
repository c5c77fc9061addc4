"""Present a model of which modules are frozen, whatever they are, by how one forward ran.

    part      the modules, and frozen tensors that are read before them    layer 0
    rest      everything else; no tensors of it are named here             layer 1

A row is what the modules return for a sample, and nothing is known of them but that. So a part may
be a tower, a backbone, an encoder, or a model by itself: a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from autopipe.random_state import random_state
from pipetransformer.model.dependence import PADDING_MASK, are_equal, half_padded
from pipetransformer.model.layered_model import LayeredModel, Sublayer, named_tensors
from pipetransformer.model.own_forward import Entries
from pipetransformer.model.recording import (
    Arguments,
    ForwardFailedError,
    Reads,
    Row,
    whole_in_mode,
)


class UnlikeAnswerError(ValueError):
    """Say that a part returns something else for some samples than for others."""


@final
@dataclass(frozen=True)
class Answer:
    """Say what a part returned: tensors' shapes, without samples, and all that is no tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    def blank(self, num_samples: int, device: torch.device) -> Any:
        """Return the like of it for samples, of NaN, or of zeros where these are no floats."""
        tensors = (
            torch.full(
                (), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device
            ).expand(num_samples, *shape)
            for shape, dtype in self.shapes
        )
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@final
@dataclass(frozen=True)
class Packing:
    """Put what parts return for samples into one tensor, (N, ...), and take it out again.

    A single tensor stays what it is. Several become bytes, (N, B), in the order of the parts; of
    padded texts (N, S, B), so that a row is as long as its text.
    Where a sample has any number of entries, such as one for each of its images, its bytes begin
    with these numbers, int64, one for each tensor; a sample of too many has -1, and no row.

    Args:
        answers: one for each part.
        names: of the parts, for errors.
        most_bytes: that a sample's entries may take; None where each has one entry.
        num_leading: dimensions that all tensors share: 1, of samples, or 2, of positions, too.
    """

    answers: tuple[Answer, ...]
    names: tuple[str, ...]
    most_bytes: int | None = None
    num_leading: int = 1

    @classmethod
    def of(cls, flat: Mapping[str, _Flat], num_samples: int) -> Packing:
        """Return that of answers, which `tree_flatten` has taken apart, by parts' names.

        Raises:
            UnlikeAnswerError: a part does not return one entry a sample.
        """
        answers = (_answer_of(name, *one, num_samples) for name, one in flat.items())
        return cls(tuple(answers), tuple(flat))

    @classmethod
    def counting(cls, alone: Sequence[Mapping[str, _Flat]]) -> Packing:
        """Return that of answers for samples that ran alone, with any number of entries each."""
        answers = tuple(_answer_of(name, *one, None) for name, one in alone[0].items())
        sizes = [sum(tensor.nbytes for tensor in _tensors(flat)) for flat in alone]
        return cls(answers, tuple(alone[0]), max(sizes))

    @property
    def is_single(self) -> bool:
        """Return whether a row is one tensor of the parts' own dtype."""
        return self.most_bytes is None and len(self._shapes) == 1

    @property
    def _shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shapes behind what all tensors share, and dtypes."""
        first = self.num_leading - 1
        return [(shape[first:], d) for answer in self.answers for shape, d in answer.shapes]

    def lacks(self, rows: Tensor) -> bool:
        """Return whether one of the rows is none, as its sample has too many entries."""
        return self.most_bytes is not None and -1 in self._counts(rows)[0]

    def _counts(self, rows: Tensor) -> list[list[int]]:
        """Return the numbers of entries, by tensors, of each row."""
        head = _copied(rows[:, : 8 * len(self._shapes)]).view(torch.int64)
        counts: list[list[int]] = head.T.tolist()
        return counts

    def packed(self, answers: Sequence[Any], num_samples: int) -> Tensor:
        """Return a row for each sample; only of one where its entries are counted.

        Raises:
            UnlikeAnswerError: a part has returned something else than for the first samples.
        """
        tensors: list[Tensor] = []
        for known, name, answer in zip(self.answers, self.names, answers, strict=True):
            leaves, spec = tree_flatten(answer)
            _refuse_unknown(name, leaves)
            num = num_samples if self.most_bytes is None else None
            found = _answer_of(name, leaves, spec, num)
            shapes = [(shape[self.num_leading - 1 :], d) for shape, d in found.shapes]
            due = [(shape[self.num_leading - 1 :], d) for shape, d in known.shapes]
            is_alike = self.is_single or shapes == due
            if spec != known.spec or not is_alike or not _are_same(found.leaves, known.leaves):
                raise UnlikeAnswerError(
                    f"{name!r} returns {_spelled(found)} for some samples, and "
                    f"{_spelled(known)} for others; give all samples one shape, or leave it out "
                    "of parts="
                )
            tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return self.joined(tensors)

    def of_none(self, device: torch.device) -> Tensor:
        """Return the row of a sample that has no entry, where entries are counted."""
        shapes = self._shapes
        return self.joined([torch.empty((0, *one), dtype=d, device=device) for one, d in shapes])

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return rows of the tensors of all answers."""
        if self.is_single:
            return tensors[0]
        if self.most_bytes is not None:
            return self._counted(tensors, self.most_bytes)
        leading = self.num_leading
        flat = [_copied(one.detach().reshape(*one.shape[:leading], -1)) for one in tensors]
        return torch.cat([one.view(torch.uint8) for one in flat], dim=-1)

    def _counted(self, tensors: Sequence[Tensor], most_bytes: int) -> Tensor:
        counts = torch.tensor([len(one) for one in tensors], device=tensors[0].device)
        data = torch.cat([_copied(one.detach()).flatten().view(torch.uint8) for one in tensors])
        if len(data) > most_bytes:
            counts, data = torch.full_like(counts, -1), data[:0]
        row = torch.cat([counts.view(torch.uint8), data])
        return nn.functional.pad(row, (0, most_bytes - len(data)))[None]

    def _uncounted(self, rows: Tensor) -> list[Tensor]:
        shapes, counts = self._shapes, self._counts(rows)
        sizes = [
            [num * shape.numel() * dtype.itemsize for num in own]
            for own, (shape, dtype) in zip(counts, shapes, strict=True)
        ]
        head, pieces = 8 * len(shapes), list[tuple[Tensor, ...]]()
        for row, own in zip(rows, zip(*sizes, strict=True), strict=True):
            pieces.append(row[head : head + sum(own)].split(own))
        return [
            torch.cat(own).view(dtype).view(sum(nums), *shape)
            for own, nums, (shape, dtype) in zip(
                zip(*pieces, strict=True), counts, shapes, strict=True
            )
        ]

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of all answers, from their rows."""
        if self.is_single:
            return [rows]
        if self.most_bytes is not None:
            return self._uncounted(rows)
        shapes = self._shapes
        leading = rows.shape[: self.num_leading]
        pieces = rows.split([shape.numel() * dtype.itemsize for shape, dtype in shapes], dim=-1)
        return [
            _copied(piece).view(dtype).view(*leading, *shape)
            if shape.numel()
            else rows.new_empty((*leading, *shape), dtype=dtype)
            for piece, (shape, dtype) in zip(pieces, shapes, strict=True)
        ]

    def unpacked(self, part: int, rows: Tensor) -> Any:
        """Return what a part has returned for samples, from their rows."""
        answer = self.answers[part]
        first = sum(len(one.shapes) for one in self.answers[:part])
        own = iter(self.tensors(rows)[first:])
        leaves = [next(own) if leaf is _TENSOR else leaf for leaf in answer.leaves]
        return tree_unflatten(leaves, answer.spec)


_Flat = tuple[list[Any], TreeSpec]
"""What a part has returned, taken apart."""


@final
class _TENSOR:
    """Stand where an answer has a tensor; a class, which copies of a model share."""


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _copied(one: Tensor) -> Tensor:
    # Not `contiguous`: a single row counts as such, wherever it begins, and has no other dtype.
    return one.clone(memory_format=torch.contiguous_format)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b) for a, b in pairs
    )


def _spelled(answer: Answer) -> str:
    tensors = [f"{('N', *shape)} {dtype}" for shape, dtype in answer.shapes]
    return ", ".join([*tensors, *(repr(one) for one in answer.leaves if one is not _TENSOR)])


@final
@dataclass
class PartCall:
    """Say of a part's call what a `BlockCall` says of a block's.

    Attributes:
        computes_in: the dtype of autocast where rows were made; a model may have one of its own.
    """

    packing: Packing
    part: int
    computes_in: torch.dtype | None = None

    def answered(self, rows: Tensor, given: Arguments, *, needs_gradients: bool) -> Any:
        """Return what a part returns, from rows, where it was given this."""
        own = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        answer = self.packing.unpacked(self.part, rows.to(own[0].device) if own else rows)
        needs_gradients = needs_gradients or any(one.requires_grad for one in own)
        if needs_gradients and torch.is_grad_enabled():
            # As reentrant checkpointing above needs it, or nothing learns. No leaves: a model may
            # write into them.
            return tree_map_only(Tensor, _needing_gradients, answer)
        return answer


def _needing_gradients(one: Tensor) -> Tensor:
    can = one.is_floating_point() or one.is_complex()
    return one.detach().requires_grad_().clone() if can else one


@dataclass
class _Record:
    """Follow one forward: what parts were given and returned, and what was read before them."""

    parts: Mapping[str, nn.Module]
    forwards: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    answers: dict[str, tuple[list[Any], TreeSpec]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    below: set[nn.Module] = field(default_factory=set)
    above: set[nn.Module] = field(default_factory=set)
    selects: bool = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.forwards = {part: part.forward for part in self.parts.values()}
        with ExitStack() as stack:
            for name, part in self.parts.items():
                note = torch.compiler.disable(partial(self._note_call, name))
                stack.callback(part.register_forward_pre_hook(note).remove)
            runs = (partial(self._run, *one) for one in self.parts.items())
            noting = [torch.compiler.disable(run) for run in runs]
            stack.enter_context(replaced(tuple(self.parts.values()), noting))
            note = torch.compiler.disable(self._note_module)
            stack.callback(register_module_forward_pre_hook(note).remove)
            stack.enter_context(Reads(self._note_read))
            stack.enter_context(_Operations(self._note_operation))
            stack.enter_context(_Lists(self._note_list))
            yield

    @property
    def is_reached(self) -> bool:
        """Return whether all parts have answered."""
        return len(self.answers) == len(self.parts)

    def _note_call(self, name: str, *_: object) -> None:
        self.order.append(name)

    def _run(self, name: str, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What `forward` returns, as hooks act where rows are handed on, too.
        answer = self.forwards[part](*args, **kwargs)
        self.answers[name] = tree_flatten(answer)  # A model may change it afterwards.
        return answer

    def _note_module(self, module: nn.Module, _args: object) -> None:
        (self.above if self.is_reached else self.below).add(module)

    def _note_operation(self, func: Any, args: Sequence[Any]) -> None:
        if self.is_reached:
            return
        # A whole number may say how many are taken, as `x[:n]` does.
        self.selects |= func is torch.ops.aten._local_scalar_dense.default and _counts(args[0])
        if torch.Tag.dynamic_output_shape not in func.tags:
            return
        # Whole numbers take as many as they are; others as many as the values say.
        indices = args[1] if func is torch.ops.aten.index.Tensor else [None]
        kinds = {None if one is None else one.dtype for one in indices}
        self.selects |= func is not torch.ops.aten.index.Tensor or bool(kinds & {*_MASKS})

    def _note_list(self, one: Tensor) -> None:
        self.selects |= not self.is_reached and _counts(one)

    def _note_read(self, identity: int) -> None:
        if not self.is_reached:
            self.read.add(identity)


_MASKS = (torch.bool, torch.uint8)


def _counts(one: Tensor) -> bool:
    return one.dtype != torch.bool and not one.is_floating_point() and not one.is_complex()


@dataclass
class _Operations(TorchDispatchMode):
    """Note which operators of torch are called."""

    note: Callable[[Any, Sequence[Any]], None]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.note(func, args)
        return func(*args, **(kwargs or {}))


@dataclass
class _Lists(TorchFunctionMode):
    """Note of which tensors values are taken past torch's operators."""

    note: Callable[[Tensor], None]

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.note(args[0])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PartTrial:
    """Hold what a model is tried with, whose parts are frozen.

    Args:
        entries: inputs of two samples or more, (N, ...) each.
        singly: all entries of a batch, of some samples alone. Where shapes are unequal of what
            parts do without, they are no inputs, and rows hold nothing but what parts return.
        run: calls the model's forward.
        is_counted: whether samples have any number of entries in what parts are given.
    """

    entries: Entries
    singly: Sequence[Entries]
    run: Callable[[Entries], Any]
    is_counted: bool


def present_parts(
    model: nn.Module,
    parts: Mapping[str, nn.Module],
    trial: PartTrial,
    *,
    beside: tuple[str, ...],
) -> LayeredModel:
    """Present a model whose parts are frozen, by what it does with a few samples.

    Args:
        parts: by name; modules of the model, or the model itself.
        beside: entries that a batch has beside the inputs.
    Raises:
        ValueError: a part is not called once, or does not return a row for each sample.
    """
    entries, singly, run = trial.entries, trial.singly, trial.run
    record = _Record(parts, selects=trial.is_counted)
    varied = [name for name in singly[0] if len({one[name].shape for one in singly}) > 1]
    with torch.no_grad(), whole_in_mode(model, training=False):
        try:
            with record.listening():
                run(entries)
        except Exception as error:
            name = type(model).__name__
            raise ForwardFailedError(
                f"the forward of this {name} fails for two samples: {error}"
            ) from error
        _refuse_calls(record, model)
        packing, rows = _packed(record, trial)

        def run_from_rows(given: Entries) -> list[Any]:
            torch.manual_seed(0)
            asked = list[int]()

            def answer(part: int) -> Any:
                asked.append(part)
                return packing.unpacked(part, rows)

            with served(tuple(parts.values()), answer):
                return [*tree_leaves(run(given)), torch.tensor(asked)]

        unread = [name for name in entries if is_unread(model, entries, name, run_from_rows)]
        read = {
            name for name in varied if name in entries and _is_read(entries, name, run, record)
        }
        by_position = _by_position(packing, entries, read, record)
        mask = None
        if by_position is not None and _is_padding_unread(entries, run, record, by_position):
            mask, packing = PADDING_MASK, by_position
        may_be_idle = not varied and packing.most_bytes is None
        idle = _idle_modules(model, record, trial, run_from_rows) if may_be_idle else ()
    row = replace(_row(model, record, packing), idle=idle)
    # A module by itself is given what others read, too.
    if (varied and (mask or not read)) or any(part is model for part in row.blocks):
        own_inputs = tuple(name for name in entries if name not in varied or name in read)
        # Rows know their own lengths by their mask.
        return _layered(model, row, own_inputs, sides=(mask,) if mask else (), mask=mask)
    sides = tuple(name for name in entries if name not in unread)
    return _layered(model, row, tuple(entries), sides=sides, targets=beside)


_MOST_TRIED = 16
"""Modules that are tried one by one."""


def _idle_modules(
    model: nn.Module,
    record: _Record,
    trial: PartTrial,
    run_from_rows: Callable[[Entries], list[Any]],
) -> tuple[tuple[nn.Module, Answer], ...]:
    """Return frozen modules that serve the parts alone, with what they answer.

    From rows all is the same where they answer NaN.
    """
    if model in record.parts.values():
        return ()
    num, answers = len(next(iter(trial.entries.values()))), dict[str, Answer]()
    tried = _served_by(model, record)

    def note(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = tree_flatten(answer := run(*args, **kwargs))
        with suppress(UnlikeAnswerError):
            answers[name] = _answer_of(name, *flat, num)
            _refuse_unknown(name, flat[0])
        return answer

    def same(names: Collection[str], *, training: bool) -> bool:
        device = next(iter(trial.entries.values())).device
        blanks = [lambda *_, n=name, **__: answers[n].blank(num, device) for name in names]
        with whole_in_mode(model, training=training):
            try:
                whole, state = run_from_rows(trial.entries), random_state(device)
                with replaced([tried[name] for name in names], blanks):
                    found = run_from_rows(trial.entries)
            except Exception:  # Any: it computes of a blank what it cannot.
                return False
        equal = len(found) == len(whole) and all(map(are_equal, found, whole))
        return equal and random_state(device) == state

    noting = [partial(note, name, module.forward) for name, module in tried.items()]
    with replaced([*tried.values()], noting):
        trial.run(trial.entries)
    names = [*answers]
    if not (names and same(names, training=False)):
        names = [name for name in names[:_MOST_TRIED] if same([name], training=False)]
    if not (names and same(names, training=False) and same(names, training=True)):
        return ()
    return tuple((tried[name], answers[name]) for name in names)


def _served_by(model: nn.Module, record: _Record) -> dict[str, nn.Module]:
    """Return the outermost frozen modules that ran before the parts had answered, by name.

    A hook on one would see what is tried.
    """
    inside = {module for part in record.parts.values() for module in part.modules()}
    paths = {name.rsplit(".", n)[0] for name in record.parts for n in range(name.count(".") + 1)}
    found, covered = dict[str, nn.Module](), set[nn.Module]()
    for name, module in model.named_modules():
        is_apart = name and module not in inside and name not in paths
        if is_apart and module in record.below and module not in covered:
            covered.update(module.modules())
            hooked = any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
            if not hooked and not any(p.requires_grad for p in module.parameters()):
                found[name] = module
    return found


def _packed(record: _Record, trial: PartTrial) -> tuple[Packing, Tensor]:
    """Return how what parts have returned becomes rows, and these of the entries' samples."""
    whole = {name: record.answers[name] for name in record.parts}
    entries, num = trial.entries, len(next(iter(trial.entries.values())))
    # What selects by values may return one entry a sample by chance.
    if record.selects or not all(one.shape[:1] == (num,) for one in _tensors(whole)):
        pair = [{n: one[place : place + 1] for n, one in entries.items()} for place in range(num)]
        few = [{n: one[n].to(entries[n].device) for n in entries} for one in trial.singly]
        found = [_alone(record, trial.run, one) for one in (*pair, *few)]
        alone = [flat for flat in found if flat is not None]
        record.answers = whole
        kinds = {tuple((t.shape[1:], t.dtype) for t in _tensors(flat)) for flat in alone}
        if len(alone) == len(found) and len(kinds) == 1:
            packing = Packing.counting(alone)
            rows = torch.cat([packing.joined(_tensors(flat)) for flat in alone[:num]])
            if [t.shape for t in packing.tensors(rows)] == [t.shape for t in _tensors(whole)]:
                return packing, rows
    packing = Packing.of(whole, num)
    return packing, packing.joined(_tensors(whole))


def _alone(
    record: _Record, run: Callable[[Entries], Any], entries: Entries
) -> dict[str, _Flat] | None:
    """Return what parts return for one sample; None where it fails."""
    record.answers, record.order = {}, []
    try:
        with record.listening():
            run(entries)
    except Exception:  # Any: behind the parts it is of no matter.
        pass
    # One that has nothing for a part may leave it out.
    return {n: record.answers[n] for n in record.parts} if record.is_reached else None


def _row(model: nn.Module, record: _Record, packing: Packing) -> Row:
    """Return the row of a record's parts, and of frozen tensors that were read before them."""
    parts = tuple(record.parts.values())
    inside = {module for part in parts for module in part.modules()}
    own = {id(t) for part in parts for t in named_tensors(part).values()}
    frozen = {id(t): n for n, t in named_tensors(model).items() if not t.requires_grad}
    return Row(
        name=", ".join(map(repr, record.parts)),
        blocks=parts,
        calls=tuple(PartCall(packing, index) for index in range(len(parts))),
        below=frozenset(name for key, name in frozen.items() if key in record.read - own),
        above=frozenset(),
        learned=frozenset(),
        called_below=frozenset(record.below - inside),
        called_above=frozenset(record.above - inside),
        samples_at=0,
        entrance=None,
        packing=packing,
    )


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
            # Maybe it is called where labels are given.
            kind = ValueError if num else ForwardFailedError
            raise kind(
                f"the forward of this {type(model).__name__} calls {name!r} "
                f"{f'{num} times' if num else 'not at all'} for two samples; a part must "
                "be called once in each forward, and not by its `forward`: name the module around "
                "the calls, or leave it out"
            )


def _refuse_unknown(name: str, leaves: list[Any]) -> None:
    odd = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN, type(None)))]
    if odd:
        raise UnlikeAnswerError(
            f"{name!r} returns a {type(odd[0]).__name__}, and what is in it is not known; have it "
            "return tensors, in tuples, lists, dicts or a ModelOutput, and a decoder no cache of "
            "its own (config.use_cache = False)"
        )


def _tensors(flat: Mapping[str, _Flat]) -> list[Tensor]:
    return [leaf for leaves, _ in flat.values() for leaf in leaves if isinstance(leaf, Tensor)]


def _answer_of(name: str, leaves: list[Any], spec: TreeSpec, num_samples: int | None) -> Answer:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        _refuse_unknown(name, leaves)
        raise UnlikeAnswerError(f"{name!r} returns no tensor, and so nothing to keep in rows")
    for one in tensors:
        if not one.ndim or num_samples not in (None, len(one)):
            raise UnlikeAnswerError(
                f"{name!r} returns a tensor of shape {tuple(one.shape)} for {num_samples} "
                "samples; rows need one entry a sample in its first dimension"
            )
    plain = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Answer(spec, plain, tuple((one.shape[1:], one.dtype) for one in tensors))


def is_unread(
    model: nn.Module, entries: Entries, name: str, run: Callable[[Entries], list[Any]]
) -> bool:
    """Return whether an entry's values are of no use where the parts' answers are known."""
    entry = entries[name]
    if not entry.is_floating_point() or entry.ndim < 3:
        return False
    nan = torch.full((), torch.nan, dtype=entry.dtype, device=entry.device)
    for training in (False, True):
        with whole_in_mode(model, training=training):
            try:
                whole = run(entries)
                found = run({**entries, name: nan.expand(entry.shape)})
            except Exception:  # Any: it is looked at for something else than its shape.
                return False
        if len(found) != len(whole) or not all(map(are_equal, found, whole)):
            return False
    return True


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
        if len(now) != len(known) or not all(map(are_equal, now, known)):
            return True
    return False


def _by_position(
    packing: Packing, entries: Entries, read: set[str], record: _Record
) -> Packing | None:
    """Return how rows are as long as their texts; None where parts do not return texts."""
    half = half_padded(entries.get(PADDING_MASK))
    if half is None or PADDING_MASK not in read or packing.most_bytes is not None:
        return None
    tensors = _tensors({name: record.answers[name] for name in record.parts})
    if any(one.shape[:2] != half.shape for one in (*tensors, *(entries[name] for name in read))):
        return None
    return packing if packing.is_single else replace(packing, num_leading=2)


def _is_padding_unread(
    entries: Entries, run: Callable[[Entries], Any], record: _Record, packing: Packing
) -> bool:
    """Return whether nothing depends on what parts return behind a text's end.

    The second half of the first sample is made padding, and its part of the row zeros.
    """
    half = half_padded(entries[PADDING_MASK])
    assert half is not None
    record.answers, record.order = {}, []
    with record.listening():
        whole = tree_leaves(run({**entries, PADDING_MASK: half}))
    own = _tensors({name: record.answers[name] for name in record.parts})
    rows = packing.joined(own)
    cut = rows.masked_fill((half == 0).view(*half.shape, *(1 for _ in rows.shape[2:])), 0)
    parts = tuple(record.parts.values())
    with served(parts, lambda part: packing.unpacked(part, cut)):
        found = tree_leaves(run({**entries, PADDING_MASK: half}))
    # The parts' own answers may be handed on to the loop, which is no matter of the model.
    pairs = zip(found, whole, strict=True)
    return all(are_equal(a, b) for a, b in pairs if not any(b is one for one in own))


def _leaves(answers: Mapping[str, tuple[list[Any], TreeSpec]]) -> list[Any]:
    return [leaf for leaves, _ in answers.values() for leaf in leaves]


def served(
    parts: Sequence[nn.Module], answer: Callable[[int], Any]
) -> AbstractContextManager[None]:
    """Have parts return other answers within the block, without running."""
    forwards = [lambda *_, index=index, **__: answer(index) for index in range(len(parts))]
    return replaced(parts, forwards)


@contextmanager
def replaced(parts: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Have parts run others' forwards within the block."""
    had = [vars(part).get("forward") for part in parts]
    try:
        for part, forward in zip(parts, forwards, strict=True):
            part.forward = forward
        yield
    finally:
        for part, own in zip(parts, had, strict=True):
            if own is None:
                del part.forward
            else:
                part.forward = own

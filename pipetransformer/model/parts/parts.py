"""Present a model with frozen modules, whatever they are, by how one forward ran.

    part      the modules, and frozen tensors that are read before them    layer 0
    rest      everything else; no tensors of it are named here             layer 1

A row is what the modules return for a sample, and nothing is known of them but that. So a part may
be a tower, a backbone, an encoder, or a model by itself: a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from autopipe.random_state import random_state
from freeze.in_place import keeps_in_eval
from pipetransformer.model.forward import (
    PADDING_MASK,
    Arguments,
    Entries,
    Flat,
    ForwardFailedError,
    Packing,
    PartAnswer,
    Row,
    UnlikeAnswerError,
    answer_of,
    are_equal,
    half_padded,
    of_each,
    refuse_unknown,
    tensors_of,
)
from pipetransformer.model.layered_model import LayeredModel, Sublayer, recorded_model
from pipetransformer.model.modules import named_tensors, whole_in_mode
from pipetransformer.model.parts.part_record import PartRecord, replaced, served


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


@dataclass(frozen=True)
class PartTrial:
    """Hold what a model is tried with, whose parts are frozen.

    Args:
        entries: inputs of two samples or more, (N, ...) each.
        singly: all entries of a batch, of some samples alone. Where shapes are unequal of what
            parts do without, they are no inputs, and rows hold nothing but what parts return.
        run: calls the model's forward.
        is_counted: whether samples have any number of entries in what parts are given.
        run_labelled: calls it, and gives it labels, where it takes some.
        is_watched: whether somebody has a hook on a module, and must see what it is given.
    """

    entries: Entries
    singly: Sequence[Entries]
    run: Callable[[Entries], Any]
    is_counted: bool
    run_labelled: Callable[[Entries], Any] | None = None
    is_watched: Callable[[nn.Module], bool] = lambda _: False


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
    varied = [name for name in singly[0] if len({one[name].shape for one in singly}) > 1]
    with torch.no_grad(), whole_in_mode(model, training=False):
        record = _recorded(model, parts, trial)
        packing, rows = _packed(record, trial)
        run_from_rows = partial(_run_from_rows, tuple(parts.values()), run, packing, rows)
        is_watched = any(map(trial.is_watched, beside_parts(record.below, parts.values())))
        unread = [
            name
            for name in entries
            if not is_watched and _is_unread(model, entries, name, run_from_rows)
        ]
        read = {
            name for name in varied if name in entries and _is_read(entries, name, run, record)
        }
        by_position = _by_position(packing, entries, read, record)
        mask = None
        if by_position is not None and _is_padding_unread(entries, run, record, by_position):
            mask, packing = PADDING_MASK, by_position
        may_be_idle = not (varied or is_watched) and packing.most_bytes is None
        idle = _idle_modules(model, record, trial, run_from_rows) if may_be_idle else ()
    row = replace(_row(model, record, packing), idle=idle)
    # A module by itself is given what others read, too.
    if (varied and (mask or not read)) or any(part is model for part in row.blocks):
        own_inputs = tuple(name for name in entries if name not in varied or name in read)
        # Rows know their own lengths by their mask.
        return _layered(model, row, own_inputs, sides=(mask,) if mask else (), mask=mask)
    sides = tuple(name for name in entries if name not in unread)
    return _layered(model, row, tuple(entries), sides=sides, targets=beside)


def _recorded(model: nn.Module, parts: Mapping[str, nn.Module], trial: PartTrial) -> PartRecord:
    """Return how one forward ran; refuse parts that it does not call once, or gives labels."""
    record = PartRecord(parts, selects=trial.is_counted)
    try:
        with record.listening():
            trial.run(trial.entries)
    except Exception as error:
        name = type(model).__name__
        raise ForwardFailedError(
            f"the forward of this {name} fails for two samples: {error}"
        ) from error
    _refuse_calls(record, model)
    if trial.run_labelled is not None and _is_labelled(record, trial.run_labelled, trial.entries):
        raise ForwardFailedError("what a part is given is made of labels")
    return record


def _run_from_rows(
    parts: tuple[nn.Module, ...],
    run: Callable[[Entries], Any],
    packing: Packing,
    rows: Tensor,
    entries: Entries,
) -> list[Any]:
    """Return the leaves of a forward's answer where parts return rows, and their order."""
    torch.manual_seed(0)
    asked = list[int]()

    def answer(part: int) -> Any:
        asked.append(part)
        return packing.unpacked(part, rows)

    with served(parts, answer):
        return [*tree_leaves(run(entries)), torch.tensor(asked)]


def beside_parts(modules: Iterable[nn.Module], parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are in no part, and that hold none."""
    known = [{*part.modules()} for part in parts]
    return [m for m in modules if not any(m in inner or inner & {*m.modules()} for inner in known)]


_MOST_TRIED = 16
"""Modules that are tried one by one."""


def _idle_modules(
    model: nn.Module,
    record: PartRecord,
    trial: PartTrial,
    run_from_rows: Callable[[Entries], list[Any]],
) -> tuple[tuple[nn.Module, PartAnswer], ...]:
    """Return frozen modules that serve the parts alone, with what they answer.

    From rows all is the same where they answer NaN.
    """
    if model in record.parts.values():
        return ()
    num, answers = len(next(iter(trial.entries.values()))), dict[str, PartAnswer]()
    tried = _served_by(model, record)

    def note(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flat = tree_flatten(answer := run(*args, **kwargs))
        with suppress(UnlikeAnswerError):
            answers[name] = answer_of(name, *flat, num)
            refuse_unknown(name, flat[0])
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
        return _all_equal(found, whole) and random_state(device) == state

    noting = [partial(note, name, module.forward) for name, module in tried.items()]
    with replaced([*tried.values()], noting):
        trial.run(trial.entries)
    names = [*answers]
    if not (names and same(names, training=False)):
        names = [name for name in names[:_MOST_TRIED] if same([name], training=False)]
    if not (names and same(names, training=False) and same(names, training=True)):
        return ()
    return tuple((tried[name], answers[name]) for name in names)


def _served_by(model: nn.Module, record: PartRecord) -> dict[str, nn.Module]:
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
            hooked = any(map(_is_hooked, module.modules()))
            if not hooked and not any(p.requires_grad for p in module.parameters()):
                found[name] = module
    return found


def _is_hooked(module: nn.Module) -> bool:
    before = module._forward_pre_hooks.values()
    return bool(module._forward_hooks) or not all(map(keeps_in_eval, before))


def _packed(record: PartRecord, trial: PartTrial) -> tuple[Packing, Tensor]:
    """Return how what parts have returned becomes rows, and these of the entries' samples."""
    whole = {name: record.answers[name] for name in record.parts}
    entries, num = trial.entries, len(next(iter(trial.entries.values())))
    # What selects by values may return one entry a sample by chance.
    if record.selects or not all(one.shape[:1] == (num,) for one in tensors_of(whole)):
        pair = [{n: one[place : place + 1] for n, one in entries.items()} for place in range(num)]
        few = [{n: one[n].to(entries[n].device) for n in entries} for one in trial.singly]
        found = [_alone(record, trial.run, one) for one in (*pair, *few)]
        alone = [flat for flat in found if flat is not None]
        kinds = {tuple((t.shape[1:], t.dtype) for t in tensors_of(flat)) for flat in alone}
        if len(alone) == len(found) and len(kinds) == 1:
            packing = Packing.counting(alone)
            rows = torch.cat([packing.joined(tensors_of(flat)) for flat in alone[:num]])
            if [t.shape for t in packing.tensors(rows)] == [t.shape for t in tensors_of(whole)]:
                return packing, rows
    packing = Packing.of(whole, num)
    return packing, packing.joined(of_each(tensors_of(whole), num))


def _is_labelled(record: PartRecord, run: Callable[[Entries], Any], entries: Entries) -> bool:
    """Return whether parts return something else where the forward is given labels."""
    labelled = PartRecord(record.parts)
    # Any: behind the parts it is of no matter.
    with suppress(Exception), labelled.listening():
        run(entries)
    return labelled.is_reached and not _all_equal(labelled.leaves, record.leaves)


def _alone(
    record: PartRecord, run: Callable[[Entries], Any], entries: Entries
) -> dict[str, Flat] | None:
    """Return what parts return for one sample; None where it fails."""
    own = record.anew()
    # Any: behind the parts it is of no matter.
    with suppress(Exception), own.listening():
        run(entries)
    # A sample that has nothing for a part may leave it out.
    return {n: own.answers[n] for n in own.parts} if own.is_reached else None


def _row(model: nn.Module, record: PartRecord, packing: Packing) -> Row:
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
    sublayers = [Sublayer("part", 0, holder), Sublayer("rest", 1, nn.Identity(), sides)]
    return recorded_model(model, sublayers, row, inputs=inputs, targets=targets, padding_mask=mask)


def _refuse_calls(record: PartRecord, model: nn.Module) -> None:
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


def _is_unread(
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
        if not _all_equal(found, whole):
            return False
    return True


def _is_read(
    entries: Entries, name: str, run: Callable[[Entries], Any], record: PartRecord
) -> bool:
    """Return whether parts return something else, or fail, where an entry has other values."""
    entry = entries[name]
    for other in (torch.zeros_like(entry), torch.ones_like(entry), entry.roll(1, 0)):
        own = record.anew()
        # Any: behind the parts it is of no matter.
        with suppress(Exception), own.listening():
            run({**entries, name: other})
        if not (own.is_reached and _all_equal(own.leaves, record.leaves)):
            return True
    return False


def _by_position(
    packing: Packing, entries: Entries, read: set[str], record: PartRecord
) -> Packing | None:
    """Return how rows are as long as their texts; None where parts do not return texts."""
    half = half_padded(entries.get(PADDING_MASK))
    if half is None or PADDING_MASK not in read or packing.most_bytes is not None:
        return None
    tensors = tensors_of({name: record.answers[name] for name in record.parts})
    if any(one.shape[:2] != half.shape for one in (*tensors, *(entries[name] for name in read))):
        return None
    return packing if packing.is_single else replace(packing, num_leading=2)


def _is_padding_unread(
    entries: Entries, run: Callable[[Entries], Any], record: PartRecord, packing: Packing
) -> bool:
    """Return whether nothing depends on what parts return behind a text's end.

    The second half of the first sample is made padding, and its part of the row zeros.
    """
    half = half_padded(entries[PADDING_MASK])
    assert half is not None
    padded = record.anew()
    with padded.listening():
        whole = tree_leaves(run({**entries, PADDING_MASK: half}))
    own = tensors_of({name: padded.answers[name] for name in record.parts})
    rows = packing.joined(own)
    cut = rows.masked_fill((half == 0).view(*half.shape, *(1 for _ in rows.shape[2:])), 0)
    parts = tuple(record.parts.values())
    with served(parts, lambda part: packing.unpacked(part, cut)):
        found = tree_leaves(run({**entries, PADDING_MASK: half}))
    # The parts' own answers may be handed on to the loop, which is no matter of the model.
    pairs = zip(found, whole, strict=True)
    return all(are_equal(a, b) for a, b in pairs if not any(b is one for one in own))


def _all_equal(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(are_equal, some, others))

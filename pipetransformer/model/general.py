"""Present any model that has a row of blocks: its own forward, cut between them.

    embedding   the forward up to the first block      layer 0
    blocks.0    the first block                        layer 0
    blocks.1    ...                                    layer 1
    head        the forward behind the last block      layer n

Nothing is known of the model but how it ran on a few samples (`recording`). So the Trainer
compares its sublayers with its own forward before the first step, and refuses it where they
differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from autopipe.loss import Loss, LossFunction
from pipetransformer.model.cut_sublayers import cut_sublayers
from pipetransformer.model.forward import (
    ROUTERS,
    CutForward,
    Entries,
    ForwardFailedError,
    NoRowError,
    Recording,
    gathering_nothing,
    gathers,
    has_own_forward,
    holds_block,
    joined_outputs,
    names_of,
    on_short_first,
    output_of,
    padding_mask,
    read_for_shape,
    record,
    router_rows,
    run_through,
    split_batch,
    watched,
    without_cache,
)
from pipetransformer.model.layered_model import LayeredModel, recorded_model, row_of
from pipetransformer.model.losses import WordHead, own_loss_of, word_head
from pipetransformer.model.modules import (
    has_input_gradients,
    is_opaque,
    name_untied,
    named_tensors,
    opaque_kept,
    refuse_lost_checkpointing,
    refuse_replaced,
    unwrapped,
    whole_in_mode,
)


@final
@dataclass(frozen=True)
class LoopUse:
    """Say how a loop of one's own calls a model, and what it reads.

    Args:
        beside: entries that a batch has beside the inputs.
        constants: what the forward is given beside all entries.
        needs: targets without which the forward does not run, so that they are inputs.
        keeps_to_labels: whether its loss reads no position that its label leaves out.
        gives_labels: whether it takes the loss that the forward makes of its labels. Else it may
            read any output, known or not.
        ignores_padding: whether it is promised that it reads nothing of padding.
    """

    beside: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    needs: Collection[str] = ()
    keeps_to_labels: bool = False
    gives_labels: bool = False
    ignores_padding: bool = False


@final
@dataclass(frozen=True)
class _Shown:
    """Hold what a model was given once, and what it did.

    Args:
        inputs: entries that the forward takes, the main one first.
        labels: entries of its loss.
        keywords: what it is given beside entries.
    """

    model: nn.Module
    inputs: Entries
    labels: Entries
    keywords: Mapping[str, Any]
    recording: Recording

    @property
    def config(self) -> Any:
        return getattr(unwrapped(self.model), "config", None)

    @property
    def targets(self) -> tuple[str, ...]:
        """Name the labels, or what would be one."""
        return tuple(self.labels) or names_of(self.model).targets[:1]


def present(
    model: nn.Module,
    batch: Entries,
    loss_fn: LossFunction | None = None,
    *,
    unties: bool = False,
    loop: LoopUse | None = None,
) -> LayeredModel:
    """Present a model by what it does with a few samples.

    Its forward is called once; once more where it can keep keys and values, and in a loop that
    takes the forward's own loss, or gathers its routers' logits. Long texts are cut short; where
    that fails, it is done again with whole ones.

    Args:
        batch: two samples or more; (N, ...) each. They go to where the model's weights are.
        loss_fn: the user's own; else the model's is looked for.
        unties: whether the head gets copies of the tensors that it shares with the embedding.
        loop: whose forward it is; None is the Trainer's.
    Raises:
        ForwardFailedError: its forward fails.
        ValueError: it has no row of blocks.
    """
    show = partial(_presented, model, loss_fn=loss_fn, unties=unties)
    if loop is None or not gathers(model, loop.constants):
        return on_short_first(model, batch, partial(show, loop=loop))
    with gathering_nothing(model):  # Blocks that do not run have no logits.
        others = {name: one for name, one in loop.constants.items() if name != ROUTERS}
        quiet = replace(loop, constants=others)
        layered = on_short_first(model, batch, partial(show, loop=quiet))
    row, device = row_of(layered), next(model.parameters()).device
    given = {name: batch[name].to(device) for name in layered.inputs if name in batch}
    run = partial(model, **{**without_cache(model), **loop.constants})
    layered.row = replace(row, routers=router_rows(model, row, run, given))
    return layered


def _presented(
    model: nn.Module,
    batch: Entries,
    *,
    loss_fn: LossFunction | None,
    unties: bool,
    loop: LoopUse | None,
) -> LayeredModel:
    shown = _run_once(model, batch, loss_fn, loop)
    if unties:
        shown = _untied(shown)
    _refuse_random_depth(model)
    # First, as it says by name what blocks hand to the loss, which no part below could.
    loss = (
        None if loss_fn is not None else own_loss_of(model, shown.labels, shown.recording.answer)
    )
    is_known = loss is not None or (loop is not None and _reads_no_padding(shown, loop))
    own, mask, answer = _in_parts(shown, loop)
    # A span's start is one of all positions, and of another's loss it is not known what it reads:
    # either may count hidden states of padding.
    is_by_token = mask is not None and answer[:2] == shown.inputs["input_ids"].shape
    is_by_token &= len(answer) > 2
    mask = mask if len(shown.targets) == 1 and (is_known or not is_by_token) else None
    if loop is None or not has_input_gradients(model):
        refuse_lost_checkpointing(model, own.row.blocks)
    for module in filter(partial(holds_block, row=own.row), model.modules()):
        refuse_replaced(module, allowed="forward" if has_own_forward(module) else "")
    layered = recorded_model(
        model,
        cut_sublayers(model, own),
        own.row,
        inputs=tuple(shown.inputs),
        targets=shown.targets if loop is None else loop.beside,
        loss_fn=loss,
        padding_mask=mask,
        biases=sorted(own.row.learned),
    )
    layered.reads_by_labels = mask is not None and is_by_token
    if isinstance(loss, Loss) and loss.takes_unread and loop is None:
        layered.words = _words(shown, own)
    return layered


def _words(shown: _Shown, own: CutForward) -> WordHead | None:
    """Return a head over words that losses may go without; None if it is not known to be one."""
    model = shown.model
    of_output = getattr(unwrapped(model), "get_output_embeddings", None)
    linear = None if of_output is None else of_output()
    if not isinstance(linear, nn.Linear) or linear.weight.is_meta:
        return None
    own.end_at(linear)
    tensor_ids = {id(tensor) for tensor in named_tensors(model).values()}
    heads, devices = set(), [linear.weight.device] if linear.weight.is_cuda else []
    # What is done in training alone, such as dropout, must show, too.
    for training in (False, True):
        with whole_in_mode(model, training=training), torch.random.fork_rng(devices):
            with torch.no_grad():
                hidden = own.below(shown.inputs, training=training)
            run = partial(own.above, hidden.requires_grad_(), shown.inputs, training=training)
            heads.add(word_head(linear, shown.config, run, tensor_ids=tensor_ids))
    own.forget()
    return heads.pop() if len(heads) == 1 else None


def _run_once(
    model: nn.Module, batch: Entries, loss_fn: LossFunction | None, loop: LoopUse | None
) -> _Shown:
    """Run the forward on a batch; on its labels, too, where the loss may be the model's own."""
    use, cacheless = loop or LoopUse(), without_cache(model)
    keywords = {**cacheless, **use.constants}
    inputs, labels = split_batch(model, batch, needs=use.needs)
    # Not in a loop: a model that makes its inputs of labels must be found to fail without.
    known = {**inputs, **(labels if loss_fn is None else {})}
    recording = _recorded(model, known, keywords)
    if cacheless:
        _refuse_cache(model, {**known, **use.constants}, recording.answer)
    return _Shown(model, inputs, labels, keywords, recording)


_IN_LOOPS = (
    "In a loop of your own, `attach` takes blocks that hand several tensors on, and, beside "
    "parts=, a decoder's. "
)

WAYS_OUT = (
    "docs/models.md says what trains, and how to go on: a setting of the model, a LayeredModel of "
    "its sublayers, or freeze.apply in a loop of your own"
)


def _recorded(model: nn.Module, given: Entries, keywords: Mapping[str, Any]) -> Recording:
    """Record a forward; errors say which model fails, and what to do."""
    name, num_samples = type(model).__name__, len(next(iter(given.values())))
    run = partial(model, **given, **keywords)
    try:
        try:
            return record(model, run, num_samples)
        except NoRowError:
            raise
        except Exception:  # Its forward may compute gradients itself.
            return record(model, run, num_samples, may_differentiate=True)
    except NoRowError as error:
        raise NoRowError(
            f"this {name} has no row of blocks at which it could be cut and frozen: {error}. "
            f"{_IN_LOOPS}{WAYS_OUT}"
        ) from error
    except Exception as error:
        raise ForwardFailedError(
            f"the forward of this {name} fails for two samples: {error}"
        ) from error


def _reads_no_padding(shown: _Shown, loop: LoopUse) -> bool:
    """Return whether a loop's loss reads nothing where its label says so, or of padding."""
    if loop.keeps_to_labels or loop.ignores_padding or not (loop.gives_labels and shown.labels):
        return loop.keeps_to_labels or loop.ignores_padding
    model = shown.model
    try:
        with torch.no_grad(), whole_in_mode(model, training=False):
            answer = model(**{**shown.inputs, **shown.labels}, **shown.keywords)
        return own_loss_of(model, shown.labels, answer) is not None
    except (TypeError, ValueError):
        return False


def _in_parts(shown: _Shown, loop: LoopUse | None) -> tuple[CutForward, str | None, torch.Size]:
    """Return the forward in parts, at the first row where these give its answer.

    Returns:
        it, the name of its padding mask, and its answer's shape.
    """
    model, given, answer = shown.model, shown.inputs, shown.recording.answer
    make, why = partial(CutForward, model, inputs=tuple(given), keywords=shown.keywords), ""
    tensors = [*named_tensors(model).values()]
    with torch.no_grad(), whole_in_mode(model, training=False), opaque_kept(tensors):
        if any(map(is_opaque, tensors)):  # Their kernels may be others where a gradient is due.
            answer = model(**given, **shown.labels, **shown.keywords)
        # A loop may read any output, known or not.
        read, is_known = (output_of, True) if loop is None else _reading(answer)
        expected = read(answer)
        for row in shown.recording.rows:
            own = make(row, example={})
            try:
                found = run_through(own, given, read)
                # A plan is made of shapes alone, on the meta device.
                gap = 0.0 if found.is_meta else float((found - expected).abs().max())
                blind = read_for_shape(own, given, read)
            except Exception as error:
                why = why or f"cut at {row.name!r} it fails: {error!r}"
                continue
            if expected.is_meta or gap <= _ROUNDING * float(expected.abs().max()):
                is_known |= loop is not None and loop.ignores_padding
                mask = padding_mask(own, given, shown.config) if is_known else None
                return make(row, example=blind), mask, expected.shape
            why = why or f"cut at {row.name!r} it gives another answer, by {gap:.3g}"
    raise NoRowError(f"this {type(model).__name__} cannot be run in parts: {why}. {WAYS_OUT}")


_ROUNDING = 1e-3


def _reading(answer: Any) -> tuple[Callable[[Any], Tensor], bool]:
    """Return what takes outputs out of an answer, and whether it is known what they are."""
    try:
        output_of(answer)
    except TypeError:
        return joined_outputs, False
    return output_of, True


def _refuse_cache(model: nn.Module, given: Mapping[str, Any], answer: Any) -> None:
    """Raise a ValueError where keys and values that are kept for more tokens change the answer."""
    read, _ = _reading(answer)
    with watched(model):  # As it was recorded, or other kernels might run.
        one, other = read(model(**given)), read(answer)
    if one.shape == other.shape and not torch.equal(one, other):
        raise ValueError(
            f"this {type(model).__name__} gives other outputs with use_cache=False, which trains "
            "here: texts packed into one sample may see each other otherwise. Set "
            "model.config.use_cache = False"
        )


def _untied(shown: _Shown) -> _Shown:
    """Give modules above the blocks copies of the parameters that modules below hold, too.

    Returns:
        the same, with the best row alone, whose head reads the copies.
    Raises:
        ValueError: the head has no module of its own that holds such a parameter.
    """
    model, row = shown.model, shown.recording.rows[0]
    if not row.below & row.above:
        return shown
    parameters, copies = dict(model.named_parameters()), set()
    tied_names = row.below & row.above & parameters.keys()
    for name in sorted(tied_names):
        tied, own = parameters[name], nn.Parameter(parameters[name].detach().clone())
        own.requires_grad_(tied.requires_grad)
        holders = [
            (module, attribute)
            for module in row.called_above - row.called_below
            for attribute, parameter in module._parameters.items()
            if parameter is tied
        ]
        if not holders:
            raise ValueError(
                f"tied_weights='untie', but the head of this {type(model).__name__} has no "
                f"{name!r} of its own: choose 'freeze' or 'train'"
            )
        for module, attribute in holders:
            setattr(module, attribute, own)
        copies.add(own)
        name_untied(model, [module for module, _ in holders])
    if (config := shown.config) is not None:  # Or `from_pretrained` would tie them again.
        config.tie_word_embeddings = False
    names = {name for name, parameter in model.named_parameters() if parameter in copies}
    row = replace(row, above=row.above - tied_names | names)
    return replace(shown, recording=replace(shown.recording, rows=[row]))


def _refuse_random_depth(model: nn.Module) -> None:
    """Raise a ValueError where blocks are left out at random: all are run here."""
    for module in model.modules():
        for name in ("layerdrop", "layer_drop"):
            chance = vars(module).get(name)
            if isinstance(chance, float) and chance > 0:
                raise ValueError(
                    f"{name} of a {type(module).__name__} is {chance}: blocks would be left out "
                    "at random, but here each runs; set it to 0 in the configuration"
                )

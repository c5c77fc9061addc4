"""Look at a loop's model and at its loader's samples, as the loop gives them to the model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from autocache import HIDDEN
from autopipe.loss import Loss
from freeze.in_place import list_before
from pipetransformer.config import TrainConfig
from pipetransformer.feed import Samples, TargetSource, own_random_numbers
from pipetransformer.loop.batches import (
    POSITIONS,
    TOKENS,
    BatchForm,
    Bundles,
    DataWatch,
    JoinedTexts,
    LoaderCollation,
    Pieces,
    beside,
    in_pieces,
)
from pipetransformer.loop.forward import (
    InnerHooks,
    LoopCall,
    PartialForward,
    Place,
    ShardedWeights,
    in_own_forward,
    left_alone,
)
from pipetransformer.loop.rows.frozen_parts import UNTIED_LATE
from pipetransformer.loop.rows.settings import LoopSettings
from pipetransformer.model import (
    DTYPES,
    ForwardFailedError,
    LayeredModel,
    LoopUse,
    PartTrial,
    Row,
    Task,
    adamw,
    computing_in,
    forward_parameters,
    names_of,
    present,
    present_parts,
    row_of,
    unwrapped,
    whole_in_mode,
)

_LOGGER = logging.getLogger(__name__)

_MOST_COMPARED = 8
"""Samples whose shapes are compared, where parts are frozen."""


@final
class LoopModel:
    """Hold what is known of a model and a loader's samples, for one way of calling the model.

    Args:
        loader: torch's own, below those that wrap it.
        whole_form: of its batches.
        calls: of the model, one for each column of the loader's batches.
    Raises:
        TypeError, ValueError: the model cannot be cut, or the samples do not fit it.

    Attributes:
        pieces: which rows of a column belong to a sample.
        bundles: what samples have any number of; `bundle_names` in the loader's batches.
        joined: joins samples along their tokens, where the loader does.
        form: of batches of pieces.
        samples: of pieces; `whole`: as the data set has them.
        example: inputs of two samples, (N, ...) each.
        task: the model, with a loss that nobody asks for.
        partial: runs it up to a block.
        is_read_whole: whether each batch is read as the loader makes it, beside its rows.
        is_read_here: whether the loop's own process reads samples, and not a worker.
        blocks: the model's row of blocks, bottom first.
        weights: where `fully_shard` has parted the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        whole_form: BatchForm,
        calls: tuple[LoopCall, ...],
        settings: LoopSettings,
    ) -> None:
        self._model, self.calls, call = model, calls, calls[0]
        self.weights: ShardedWeights | None = None
        self.is_read_here = not loader.num_workers
        self.joined = _joined(model, whole_form, call, settings)
        whole_form = whole_form.bundling(_bundled(whole_form, call) if settings.parts else ())
        self.bundle_names = whole_form.bundles
        self.pieces = pieces = _pieces(whole_form, calls)
        self.form = whole_form.in_pieces(pieces)
        config = settings.config(loader)
        if config.cache_views is not None and (pieces.num > 1 or self.bundle_names):
            raise ValueError(
                "cache_views= keeps no views of samples with several rows; leave it out"
            )
        function = loader.collate_fn
        self.collation = collation = _collation(model, calls, self.form, function, pieces)
        if odd := [name for name in settings.reads if name not in whole_form.names]:
            raise ValueError(f"reads= names {odd}; batches have {[*whole_form.names]}")
        dataset: Any = in_pieces(loader.dataset, pieces.num)
        self.samples = Samples(dataset, collation, config.seed)
        self.whole = Samples(loader.dataset, collation, config.seed)  # type: ignore[arg-type]
        self.bundles = Bundles(
            {own: name for name, own in call.parameters.items() if name in self.bundle_names},
            collation.alone,
            self._read_bundles,
        )
        inputs = [name for one in calls for name in one.parameters]
        self.data = DataWatch(loader.dataset, inputs, function)
        had = {id(parameter) for parameter in model.parameters()}
        device = next(model.parameters()).device
        with left_alone(model, device), in_own_forward(model):
            middle = len(loader.dataset) // 2 * pieces.num  # type: ignore[arg-type]
            self.example = self.samples.probe([0, middle])
            show = self._with_parts if settings.parts else self._presented
            layered = show(model, config, settings)
            self._set_apart(layered, loader, settings, config)
            if self.joined is not None:
                layered.padding_mask = TOKENS
            sides = layered.sides_of(0, len(layered.sublayers))
            source = TargetSource(self.samples, sides)
            if "cache_check" not in settings.cache and not source.knows():
                # A corrected label is seen in its sample alone, so each sample is read.
                config = replace(config, cache_check="all")
        if any(id(parameter) not in had for parameter in model.parameters()):
            raise ValueError(UNTIED_LATE)
        if not settings.parts:
            _refuse_lists_before(model, layered)
        trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        self.task = Task(layered, Loss(F.cross_entropy), adamw(), config, trainable)
        opening = self.joined or self.bundles
        self.partial = PartialForward(self.task, self.example, call, opening)
        self.partial.beside = {
            name: self.example[name][:1]
            for name in call.parameters.values()
            if name not in layered.inputs
        }
        self.blocks: Sequence[nn.Module] = row_of(layered).blocks

    def _presented(
        self, model: nn.Module, config: TrainConfig, settings: LoopSettings
    ) -> LayeredModel:
        """Return what the example shows of the model."""
        call, unties = self.calls[0], config.tied_weights == "untie"
        use = LoopUse(
            beside=self.collation.targets,
            constants=call.constants,
            needs=call.needs,
            keeps_to_labels=settings.keeps_to_labels,
            # Where all is read, as by metrics, what is returned of padding is, too.
            gives_labels=bool(call.targets) and not settings.reads_all,
            ignores_padding=settings.ignores_padding,
        )
        return present(model, self.example, F.cross_entropy, unties=unties, loop=use)

    def _with_parts(
        self, model: nn.Module, config: TrainConfig, settings: LoopSettings
    ) -> LayeredModel:
        """Return what the example shows of a model whose parts are frozen."""
        call, device = self.calls[0], next(model.parameters()).device
        entries = {name: self.example[name].to(device) for name in call.parameters.values()}

        def run(given: Mapping[str, Tensor], how: LoopCall = call) -> Any:
            args, kwargs = how.arguments(self.bundles.opened(given))
            with computing_in(DTYPES[config.precision], device):
                return model(*args, **kwargs)

        def run_labelled(given: Mapping[str, Tensor]) -> Any:
            targets = {name: self.example[name].to(device) for name in labels.values()}
            return run({**given, **targets}, _given_too(call, labels))

        labels = _labels_of(model, call)
        singly = [self.samples.probe([index]) for index in self.samples.spread(_MOST_COMPARED)]
        shown = present_parts(
            model,
            settings.parts,
            PartTrial(
                entries,
                singly,
                run,
                is_counted=bool(self.bundle_names),
                run_labelled=run_labelled if labels else None,
                is_watched=lambda module: InnerHooks(module).are_on_it(),
            ),
            beside=self.collation.targets,
        )
        refuse_rounding(row_of(shown), config)
        return shown

    def _set_apart(
        self,
        layered: LayeredModel,
        loader: DataLoader[Any],
        settings: LoopSettings,
        config: TrainConfig,
    ) -> None:
        """Have samples give nothing but what parts take, where rows hold nothing else."""
        call = self.calls[0]
        is_alone = any(part is layered.model for part in settings.parts.values())
        taken = {n: one for n, one in call.parameters.items() if one in layered.inputs}
        is_whole = (taken.keys(), layered.targets) == (
            call.parameters.keys(),
            self.collation.targets,
        )
        is_apart = bool(settings.parts) and not is_whole and not is_alone
        is_asked = bool(settings.reads) or settings.reads_all
        self.is_read_whole = is_asked or bool(self.bundle_names) or is_alone or is_apart
        self.is_read_whole |= self.joined is not None or self.collation.gives_inputs_alone
        if is_apart:
            calls = (replace(call, parameters=taken),)
            form = replace(self.form, names=tuple(taken), is_whole=False)
            collation = _collation(layered.model, calls, form, loader.collate_fn, self.pieces)
            self.collation = replace(collation, alone=self.collation.alone)
            self.samples = Samples(self.samples.dataset, self.collation, config.seed)

    def _read_bundles(self, ids: list[int]) -> Mapping[str, Tensor]:
        """Return the entries of samples as the loader joins them."""
        with own_random_numbers(next(self._model.parameters()).device):
            return self.form.entries_of(self.whole.collated(ids, view=0))

    @property
    def sides(self) -> tuple[str, ...]:
        """Name the inputs that are read above the blocks, too."""
        return self.task.model.sides_of(0, len(self.task.model.sublayers))

    def run_example(self) -> None:
        """Run the model's forward on two samples, in eval mode."""
        model = self.task.model.model
        device = next(model.parameters()).device
        entries = {n: self.example[n].to(device) for n in self.calls[0].parameters.values()}
        with (
            left_alone(model, device),
            whole_in_mode(model, training=False),
            in_own_forward(model),
        ):
            self.partial.whole(entries)

    def expect(self, call: LoopCall) -> None:
        """Take another call for the model's only one: it has the rows of the one before."""
        self.calls, self.partial.call = (call,), call

    def watched(self, depth: int) -> Iterator[nn.Module]:
        """Yield the modules that may change what so many blocks return, and those around them."""
        row = self.partial.row
        above = {part for block in row.blocks[depth:] for part in block.modules()}
        for module in self.task.model.model.modules():
            if module not in above and (
                module not in row.called_above or module in row.called_below
            ):
                yield module

    def run_blocks(self, batch: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Run frozen blocks on samples' entries, or on what the last one of `first` returns."""
        model = self.task.model
        names = {*model.inputs, model.padding_mask}
        entries = {name: entry for name, entry in batch.items() if name in names}
        hidden = batch[HIDDEN] if first else None
        apart = nullcontext() if self.weights is None else self.weights.apart(self.places(last))
        with apart:
            return self.partial(entries, first=first, last=last, hidden=hidden)[0]

    def places(self, depth: int) -> list[Place]:
        """Return where the model holds what so many blocks, and all below them, compute with."""
        model = self.task.model
        names = [n for n, i in model.owners.items() if model.sublayers[i].layer < depth]
        held = [(vars(holder), own) for holder, own in map(model.holder, names)]
        return [
            (has["_parameters" if own in has["_parameters"] else "_buffers"], own)
            for has, own in held
        ]


def look_at(
    model: nn.Module,
    loader: DataLoader[Any],
    whole_form: BatchForm,
    calls: tuple[LoopCall, ...],
    settings: LoopSettings,
) -> LoopModel:
    """Look at a model, with its labels where it does not run without them; see `LoopModel`."""
    try:
        return LoopModel(model, loader, whole_form, calls, settings)
    except ForwardFailedError:
        if not (labels := _labels_of(model, calls[0])):
            raise
        # A decoder whose inputs are made of labels: they are inputs as others are.
        given = tuple(_given_too(one, labels) for one in calls)
        return LoopModel(model, loader, whole_form, given, settings)


def _labels_of(model: nn.Module, call: LoopCall) -> dict[str, str]:
    """Return the entries of a call's labels that the model's forward takes, with its names."""
    takes = forward_parameters(model)
    return {name: one for name, one in call.targets.items() if one in takes}


def _given_too(call: LoopCall, labels: Mapping[str, str]) -> LoopCall:
    return replace(call, parameters={**call.parameters, **labels}, targets={})


def refuse_rounding(row: Row, config: TrainConfig) -> None:
    """Raise a ValueError where rows of several tensors were to be rounded."""
    if config.cache_dtype is not None and row.packing is not None and not row.packing.is_single:
        raise ValueError(
            f"cache_dtype={config.cache_dtype!r} rounds rows of a single tensor, but {row.name} "
            "return several; leave it out"
        )


def _refuse_lists_before(model: nn.Module, layered: LayeredModel) -> None:
    before = list_before(model, row_of(layered).blocks)
    if before and any(p.requires_grad for p in model.get_submodule(before).parameters()):
        raise ValueError(
            f"{before!r}, a list of equal blocks, lies before the row of blocks that can be "
            "cached, and would freeze as a whole with block 0. To freeze so on purpose, name the "
            "module around it in parts="
        )
    _LOGGER.info("blocks freeze in the order of %r", row_of(layered).name)


def _joined(
    model: nn.Module, form: BatchForm, call: LoopCall, settings: LoopSettings
) -> JoinedTexts | None:
    """Return what joins samples where the loader does; refuse what would mix them."""
    if not form.is_joined:
        return None
    if getattr(getattr(unwrapped(model), "config", None), "use_cache", False):
        raise ValueError(
            "the loader's collate_fn joins samples along their tokens, and with use_cache=True "
            "these see each other: set model.config.use_cache = False"
        )
    if settings.parts:
        raise ValueError(
            "the loader's collate_fn joins samples along their tokens, and rows of parts, or of "
            "blocks that hand several tensors on, are not kept of these: give it a collate_fn "
            "that pads them"
        )
    if POSITIONS not in call.parameters.values():
        raise ValueError(
            f"the loader's collate_fn joins samples along their tokens; have it return {POSITIONS}"
            " that begin anew with each sample, and give them to the model, or frozen blocks see "
            "other samples"
        )
    return JoinedTexts()


def _pieces(form: BatchForm, calls: tuple[LoopCall, ...]) -> Pieces:
    """Number the rows that samples have in what a loop gives its model."""
    for call in calls:
        if len({form.rows[name] for name in call.parameters}) > 1:
            raise ValueError(
                f"the model is given {[*call.parameters]} at once, and samples have other numbers "
                "of rows in some than in others, or in another order: collate them alike"
            )
    return Pieces(tuple(form.rows[next(iter(call.parameters))] for call in calls))


def _bundled(form: BatchForm, call: LoopCall) -> frozenset[str]:
    """Name the entries that a model is given any number of for a sample.

    A part that is given them may return any number for a sample, too. Where all have several,
    as many, these are pieces.
    """
    several = frozenset(n for n in call.parameters if form.rows[n].num > 1)
    if len(several) == len(call.parameters) or any(form.rows[n].is_blockwise for n in several):
        several = frozenset()
    return several | form.bundles & call.parameters.keys()


def _has_other_texts(form: BatchForm, known: Collection[str]) -> bool:
    """Return whether batches have tokens of several texts, and more of them than calls give.

    Each text has a mask, such as "attention_mask" and "KL_attention_mask" of TRL's KTO.
    """
    masks = [name for name in form.names if name.endswith("attention_mask")]
    leaves = form.leaf_names
    return len(masks) > 1 and any(leaves[name].ndim > 1 for name in {*form.names} - {*known})


def _collation(
    model: nn.Module,
    calls: tuple[LoopCall, ...],
    form: BatchForm,
    collate_fn: Any,
    pieces: Pieces,
) -> LoaderCollation:
    given, reserved = tuple(dict(c.parameters) for c in calls), frozenset(names_of(model).inputs)
    known = {name for parameters in given for name in parameters}
    targets = tuple(beside(n, reserved) for n in form.names if n not in known)
    gives_inputs_alone = _has_other_texts(form, known)
    targets = () if gives_inputs_alone else targets
    targets = (TOKENS,) if form.is_joined else targets
    inputs = tuple(given[0].values())
    return LoaderCollation(
        names=(*inputs, *targets),
        inputs=inputs,
        targets=targets,
        needs_targets=False,
        # Pieces are taken out of what the function makes, whatever it is.
        function=None if collate_fn is default_collate and pieces.num == 1 else collate_fn,
        drops_unknown=False,
        form=form,
        collate_fn=collate_fn,
        calls=given,
        reserved=reserved,
        pieces=pieces,
        gives_inputs_alone=gives_inputs_alone,
    )

"""Serve one model and one data set: the feed, the model's short forward, and batches.

loader ─ indices ─► feed: rows, or samples ─► a batch in the loader's form, which knows its rows
                                                └─► the loop ─► the model's short forward
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, islice
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import freeze as freezing
from autocache import HIDDEN, CacheStats
from autodp import broadcast_json
from autopipe.loss import Loss
from freeze.in_place import freeze_parameters, list_before, thawed_by
from pipetransformer.config import TrainConfig, make_config
from pipetransformer.feed import (
    FrozenPrefix,
    HeldTargets,
    SampleFeed,
    Samples,
    check_dataset,
    own_random_numbers,
)
from pipetransformer.loop.batch_form import BatchForm, LoaderCollation, beside
from pipetransformer.loop.data_watch import DataWatch
from pipetransformer.loop.forward_call import LoopCall, RowBatch, guessed_call
from pipetransformer.loop.loaders import base_of, giving_indices
from pipetransformer.loop.model_watch import ModelWatch, left_alone
from pipetransformer.loop.partial_forward import PartialForward
from pipetransformer.loop.pieces import Pieces, in_pieces
from pipetransformer.loop.randomness import draws_in_reading, generators_kept
from pipetransformer.loop.replaced_forward import in_own_forward
from pipetransformer.loop.rounding import compare_rounded
from pipetransformer.loop.row_probe import RowProbe
from pipetransformer.loop.short_forward import ShortForward
from pipetransformer.model import (
    ForwardFailedError,
    LayeredModel,
    Task,
    adamw,
    names_of,
    present,
    row_of,
)
from pipetransformer.processes import connect

_LOGGER = logging.getLogger(__name__)

SETTINGS = (
    "cache_folder", "cache_keep", "cache_fingerprint", "cache_limit_bytes", "cache_dtype",
    "cache_device", "cache_check", "cache_views", "augment_hidden", "prefix_chunk", "precision",
    "seed", "tied_weights",
)  # fmt: skip
"""Fields of `TrainConfig` that a loop may set."""

_READS, _IGNORES = "reads", "ignores_padding"
"""Settings of loops alone: names of entries that are read though rows make them needless, as the
loop looks at them; and whether it reads nothing that the model returns of padding."""

_USUAL_BATCH = 32
_UNTIED_LATE = (
    "tied_weights='untie' gives the head a copy of the embedding, but the loop's optimizer was "
    "built before, and would never train it. Untie the model before you build the optimizer: "
    "head = model.get_output_embeddings(); "
    "head.weight = torch.nn.Parameter(head.weight.detach().clone()); "
    "model.config.tie_word_embeddings = False. Then leave tied_weights= out"
)
_IF_RANDOM = (
    "cache_views= keeps a few fixed views of each sample; or change in the loop, behind the data "
    "set, what is to vary"
)
_MOST_READ = 16
"""Samples at which it is looked whether reading draws random numbers."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for settings that are unknown or not allowed."""
    known = (*SETTINGS, _READS, _IGNORES)
    if unknown := sorted(settings.keys() - set(known)):
        near = [one for name in unknown for one in get_close_matches(name, known, n=1)]
        meant = f"; did you mean {', '.join(near)}?" if near else f"; known: {', '.join(known)}"
        raise ValueError(f"unknown setting(s) {', '.join(unknown)}{meant}")
    reads = settings.get(_READS, ())
    if isinstance(reads, str) or not all(isinstance(name, str) for name in reads):
        raise ValueError(f"reads={reads!r} names no entries; give a tuple of names")
    make_config({name: value for name, value in settings.items() if name in SETTINGS})


@final
class RowService:
    """Freeze a model's blocks, and give a loader batches whose rows the blocks return.

    Collective where several processes train.

    Args:
        keeps_to_labels: whether the loss reads no position that its label leaves out.
    Raises:
        TypeError, ValueError: the loader's samples are not known by index, or the model cannot be
            cut.

    Attributes:
        epoch: of the loop.
        sees_first: whether a loop's first batch is yet to show what the model is given. Until the
            next one blocks freeze without rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Any,
        settings: Mapping[str, Any],
        *,
        call: LoopCall | None = None,
        keeps_to_labels: bool = False,
    ) -> None:
        self.epoch, self._edit_epoch, self._numbers = 0, 0, itertools.count()
        self._reads = tuple(settings.get(_READS, ()))
        self._ignores_padding = bool(settings.get(_IGNORES))
        self._settings = {name: value for name, value in settings.items() if name in SETTINGS}
        self._model, self._keeps_to_labels = model, keeps_to_labels
        self._to_come: deque[_Coming] = deque()
        self._new_calls, self.sees_first = list[LoopCall](), False
        self._stats, self._num_frozen = CacheStats(), -1
        self._has_told = False
        _refuse_sharded(model)
        _refuse_prompts(model)
        self._base = base = base_of(loader)
        check_dataset(base.dataset, "the loader's dataset")
        self._num_samples = len(base.dataset)  # type: ignore[arg-type]
        self.device = next(model.parameters()).device
        with generators_kept(base.collate_fn, base.dataset):
            with own_random_numbers(self.device):
                self._whole_form = BatchForm.of(base)
            self._look_at((call or _expected_call(model, self._whole_form),))
        # Until it is said what that changes.
        self._rounds = self.task.config.cache_dtype is not None

    def _look_at(self, calls: tuple[LoopCall, ...]) -> None:
        """Look at the model, with its labels where it does not run without them.

        Args:
            calls: of the model, one for each column of the loader's batches.
        """
        try:
            self._look_by(calls)
        except ForwardFailedError:
            labels = calls[0].targets
            if not labels:
                raise
            # A decoder whose inputs are made of labels: they are inputs as others are.
            self._look_by(
                tuple(
                    replace(one, parameters={**one.parameters, **labels}, targets={})
                    for one in calls
                )
            )

    def _look_by(self, calls: tuple[LoopCall, ...]) -> None:
        """Run the model on some samples, as the loop does, and make all that serves it."""
        base, model, self._calls, call = self._base, self._model, calls, calls[0]
        self._pieces = pieces = _pieces(self._whole_form, calls)
        self._form = self._whole_form.in_pieces(pieces)
        dataset: Any = in_pieces(base.dataset, pieces.num)
        config = self._config()
        self._collation = collation = _collation(model, calls, self._form, base.collate_fn, pieces)
        if odd := [name for name in self._reads if name not in self._whole_form.names]:
            raise ValueError(f"reads= names {odd}; batches have {[*self._whole_form.names]}")
        samples = Samples(dataset, collation, config.seed)
        self._whole = Samples(base.dataset, collation, config.seed)  # type: ignore[arg-type]
        self._data = DataWatch(base.dataset, [n for one in calls for n in one.parameters])
        had = {id(parameter) for parameter in model.parameters()}
        with left_alone(model, self.device), in_own_forward(model):
            self._example = samples.probe([0, self._num_samples // 2 * pieces.num])
            layered = self._presented(config, call)
            if "cache_check" not in self._settings and not HeldTargets(samples).knows():
                # A corrected label is seen in its sample alone, so each sample is read.
                config = replace(config, cache_check="all")
        if any(id(parameter) not in had for parameter in model.parameters()):
            raise ValueError(_UNTIED_LATE)
        self._refuse_lists_before(layered)
        trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        self.task = Task(layered, Loss(F.cross_entropy), adamw(), config, trainable)
        self.world = connect(self.device.type, timeout_s=config.setup_timeout_s)
        self._partial = PartialForward(self.task, self._example, call)
        prefix = FrozenPrefix(self.task, self._run_blocks)
        self.feed = SampleFeed(
            prefix,
            self.world,
            samples,
            to_come=self._fetches_to_come,
            keeps=config.cache_views or 1,
            augments=True,
        )
        self.feed.copies = True  # A loop may keep its batches.
        self.feed.advice = _IF_RANDOM
        with own_random_numbers(self.device):
            self.feed.look_for_randomness()
        self._look_for_draws(base)
        watch = ModelWatch(self._watched(0))
        self.forward = ShortForward(
            prefix,
            calls,
            watch,
            learn=self._learn,
            renew=self._renew,
            read=self._read_inputs,
        )
        self._parts = self._parts_now()

    def _config(self) -> TrainConfig:
        """Return the settings of a run that reads as the loader does."""
        base = self._base
        config = make_config(
            {
                **self._settings,
                "collate_fn": None if base.collate_fn is default_collate else base.collate_fn,
                "num_workers": base.num_workers,
                **({"prefetch_factor": base.prefetch_factor} if base.num_workers else {}),
                # Of a sampler that does not say it, batches are run in chunks of the most usual.
                "global_batch_size": getattr(base.batch_sampler, "batch_size", None)
                or _USUAL_BATCH,
                "remove_unused_columns": False,
            }
        )
        if self._pieces.num > 1 and config.cache_views is not None:
            raise ValueError(
                "cache_views= keeps no views of samples with several rows; leave it out"
            )
        return config

    def _presented(self, config: TrainConfig, call: LoopCall) -> LayeredModel:
        """Return what the example shows of the model."""
        return present(
            self._model,
            self._example,
            F.cross_entropy,
            unties=config.tied_weights == "untie",
            keeps_to_labels=self._keeps_to_labels,
            beside=self._collation.targets,
            constants=call.constants,
            gives_labels=bool(call.targets),
            ignores_padding=self._ignores_padding,
            needs=call.needs,
        )

    def _learn(self, call: LoopCall) -> ShortForward:
        """Serve the loop as it calls its model, which is not what was expected, or is more."""
        if self.forward.is_confirmed:
            self._add_column(call)
            return self.forward
        known = self._calls[0]
        gives_as_many = {*call.targets.values()} >= {*known.targets.values()}
        keeps = gives_as_many or not self.task.model.reads_by_labels
        if known.has_rows_of(call) and keeps:
            self._partial.call, self._calls = call, (call,)
            self.forward.expect(call)
            return self.forward
        self._serve((call,))
        return self.forward

    def _add_column(self, call: LoopCall) -> None:
        """Note that the loop gives the model another column of its batches, in the same way."""
        if not all(map(call.is_column_beside, (*self._calls, *self._new_calls))):
            return
        leaves, rows = self._whole_form.leaf_names, self._whole_form.rows
        pads = self.task.model.padding_mask is not None
        pairs = [(leaves[name], self._example[own]) for name, own in call.parameters.items()]
        # Rows of one layout must hold both.
        is_alike = all(
            one.dtype == other.dtype and one.shape[1 + pads :] == other.shape[1 + pads :]
            for one, other in pairs
        )
        is_of_rows = len({rows[name] for name in call.parameters}) == 1
        if is_alike and is_of_rows and self.task.config.cache_views is None:
            self._new_calls.append(call)

    def take_up_columns(self) -> None:
        """Serve what the first batch has shown, from the next one on."""
        if self._new_calls or self.sees_first:
            calls, self._new_calls, self.sees_first = (*self._calls, *self._new_calls), [], False
            with torch.inference_mode(False):
                self._serve(calls)

    def _serve(self, calls: tuple[LoopCall, ...]) -> None:
        """Look at the model anew, and serve what the loop gives it."""
        num_frozen, self._num_frozen = self._num_frozen, -1
        if calls != self._calls:
            is_awaited, num_served = self.forward.is_awaited, self.forward.num_served
            self._note_stats()
            self.forward.close()
            self.feed.close()
            self.world.close()
            expected = self._calls
            try:
                self._look_at(calls)
            except Exception:
                self._look_at(expected)  # A loop may mend a call that fails, and go on.
                self.set_depth(max(0, num_frozen))
                raise
            self.forward.is_confirmed = True
            self.forward.is_awaited, self.forward.num_served = is_awaited, num_served
        if num_frozen >= 0:
            self.set_depth(num_frozen)

    def _refuse_lists_before(self, layered: LayeredModel) -> None:
        before = list_before(self._model, row_of(layered).blocks)
        if before is not None:
            raise ValueError(
                f"{before!r}, a list of equal blocks, lies before the row of blocks that can be "
                "cached, and would freeze as a whole with block 0. To freeze so on purpose, do it "
                "without rows: freeze.apply(model, n, layers=...), bottom first"
            )
        _LOGGER.info("blocks freeze in the order of %r", row_of(layered).name)

    def _look_for_draws(self, base: DataLoader[Any]) -> None:
        """Give up the cache where reading samples draws what the loop would miss."""
        if self.task.config.cache_views is not None:
            return  # Then each view is drawn under its own seed.
        samples, dataset = self._whole, base.dataset
        owners = (dataset, samples.collation.function)
        ids = samples.spread(_MOST_READ)
        drawn = [
            draws_in_reading(lambda index=index: dataset[index], owners)  # type: ignore[misc]
            for index in ids
        ]
        draws, draws_own = map(any, zip(*drawn, strict=True))
        if not self.feed.may_cache or not (draws or draws_own):
            return
        if draws and not base.num_workers:
            self.feed.give_up()
            _LOGGER.warning(
                "no cache: the data set draws random numbers when a sample is read, without "
                "effect on those that were looked at; without the reads the loop's own random "
                "numbers would be others. Draw from a generator of the data set's own, or read by "
                "workers"
            )
        else:
            _LOGGER.warning(
                "the data set draws random numbers when a sample is read, without effect on the "
                "%d that were looked at: a change that is seldom cannot be seen, and would be "
                "kept in rows. Where there is one, freeze without rows by freeze.apply",
                len(ids),
            )

    def _watched(self, depth: int) -> Iterator[nn.Module]:
        """Yield the modules that may change what so many blocks return, and those around them."""
        row = self._partial.row
        above = {part for block in row.blocks[depth:] for part in block.modules()}
        for module in self.task.model.model.modules():
            if module not in above and (
                module not in row.called_above or module in row.called_below
            ):
                yield module

    def _run_blocks(self, batch: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Run frozen blocks on samples' entries, or on what the last one of `first` returns."""
        entries = {name: entry for name, entry in batch.items() if name in self.task.model.inputs}
        hidden = batch[HIDDEN] if first else None
        return self._partial(entries, first=first, last=last, hidden=hidden)[0]

    def refuse_another(self, loader: Any) -> None:
        """Raise a ValueError for a loader of other samples than those that were looked at."""
        base, samples = base_of(loader), self._whole
        dataset: Any = base.dataset
        function = samples.collation.function or default_collate
        if dataset is not samples.dataset or base.collate_fn != function:
            raise ValueError(
                "this loader has another data set or collate_fn than that of the first epoch, and "
                "rows are kept by index; attach once for each, or begin another training"
            )
        if len(dataset) != self._num_samples:
            raise ValueError(
                f"the data set has {len(dataset)} samples, but had {self._num_samples} in the "
                "first epoch, and rows are kept by index; close this loop and attach anew, or "
                "begin another training"
            )

    @property
    def row_blocks(self) -> Sequence[nn.Module]:
        """Return the model's row of blocks, bottom first."""
        return row_of(self.task.model).blocks

    @property
    def depth(self) -> int:
        return self.feed.prefix.depth

    @property
    def _sides(self) -> tuple[str, ...]:
        """Name the inputs that are read above the blocks, too."""
        return self.task.model.sides_of(0, len(self.task.model.sublayers))

    @property
    def may_serve(self) -> bool:
        """Tell whether there are frozen blocks, and rows may be kept of them."""
        return self.depth > 0 and self.feed.may_cache

    @property
    def may_ever_serve(self) -> bool:
        """Tell whether rows may be kept of any number of frozen blocks."""
        depths = range(1, self.task.model.num_layers + 1)
        return self.feed.may_cache and any(map(self.task.prefix_depth, depths))

    def agreed(self, num_frozen: int) -> int:
        """Return rank 0's number. Collective."""
        return int(broadcast_json(num_frozen, group=self.world.group))

    def set_depth(self, num_frozen: int) -> None:
        """Freeze blocks, and have rows of that depth. Collective."""
        model = self.task.model
        if num_frozen > model.num_layers:
            raise ValueError(
                f"freeze asks for {num_frozen} blocks, but the model has {model.num_layers}"
            )
        if num_frozen == self._num_frozen:
            return
        self._refuse_replaced(num_frozen)
        self._notice_changes()  # Another depth is watched anew.
        self._num_frozen, depth = num_frozen, self.task.prefix_depth(num_frozen)
        if depth < num_frozen and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache: the embedding is tied to the head and goes on training, so that what "
                "frozen blocks make of it changes with every step. tied_weights='freeze' freezes "
                "it with the first block, 'untie' gives the head a copy"
            )
        self.forward.give_back()
        self._freeze(num_frozen)
        if depth and (self.sees_first or not self._are_rows_right(depth)):
            depth = 0
        self._note_stats()
        # What is kept serves loops in any mode.
        with torch.inference_mode(False), own_random_numbers(self.device):
            self.feed.prefix.set_depth(depth, on_stage_0=True, use_cache=depth > 0)
            self.feed.follow_prefix()
        self.forward.set_depth(depth)

    def _parts_now(self) -> list[tuple[int, str, nn.Module, list[str]]]:
        """List what may freeze: its block, or -1 below them, its name, itself, its parameters."""
        several = enumerate(self.row_blocks)
        block_of = {part: index for index, block in several for part in block.modules()}
        watched = set(self._watched(self.task.model.num_layers))
        return [
            (block_of.get(part, -1), name, part, [*part._parameters])
            for name, part in self._model.named_modules()
            if part in watched
        ]

    def _refuse_replaced(self, num_frozen: int) -> None:
        """Raise a ValueError where what is to freeze is no more what was looked at."""
        now = [part for part in self._parts_now() if part[0] < num_frozen]
        if num_frozen and now != [part for part in self._parts if part[0] < num_frozen]:
            raise ValueError(
                f"a module of the lower {num_frozen} blocks, or below them, was replaced since "
                "they were looked at: close this loop and attach the model anew, or begin another "
                "training"
            )

    def _are_rows_right(self, depth: int) -> bool:
        """Return whether rows may take the blocks' place; a warning says why not."""
        self.forward.watch = watch = ModelWatch(self._watched(depth))
        self.forward.set_depth(depth)
        probe = RowProbe(
            self.task,
            self.feed.samples,
            self._partial,
            watch,
            self.device,
            short=self._from_rows,
            leave_out=self.forward.leave_out,
        )
        base = self._base
        try:
            with generators_kept(base.collate_fn, base.dataset):
                why = probe.why_not(depth)
        finally:
            self.forward.give_back()
        watch.renew()
        if why and not self._has_told:
            self._has_told = True
            _LOGGER.warning(
                "no cache of the lower %d blocks of %s: %s; they run at every step",
                depth,
                type(self.task.model.model).__name__,
                why,
            )
        return not why

    def _from_rows(
        self, entries: Mapping[str, Tensor], rows: Tensor, targets: Mapping[str, Tensor]
    ) -> Any:
        """Run the model from rows, as a loop will have it run."""
        fetched = {name: entry for name, entry in entries.items() if name in self._sides}
        ids = torch.full((len(rows),), -1)  # Nothing is read for it.
        batch = self._row_batch({**fetched, HIDDEN: rows}, ids, self.epoch)
        batch.depth = self.forward.depth
        given = {name: entry.to(self.device) for name, entry in batch.entries().items()}
        with self._by_ourselves():
            return self._partial.whole({**given, **targets})

    @contextmanager
    def _by_ourselves(self) -> Iterator[None]:
        """Have forwards within the block say nothing of how the loop calls its model."""
        forward = self.forward
        was_confirmed, forward.is_confirmed = forward.is_confirmed, True
        try:
            yield
        finally:
            forward.is_confirmed = was_confirmed

    def _freeze(self, num_frozen: int) -> None:
        freezing.apply(self.task.model.model, num_frozen, layers=self.row_blocks)
        freeze_parameters(self.task.model.model, self._read_below(num_frozen))

    def _read_below(self, num_frozen: int) -> set[nn.Parameter]:
        """Return what frozen blocks read, also where `freeze.apply` leaves it: a learned bias."""
        model = self.task.model
        tied = model.shared_above(num_frozen)
        keeps = tied if self.task.config.tied_weights == "train" else frozenset()
        below = (
            model.tensor(name)
            for name, index in model.owners.items()
            if model.sublayers[index].layer < num_frozen and name not in keeps
        )
        return {one for one in below if isinstance(one, nn.Parameter)}

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Return by name the weights that `set_depth` would thaw."""
        staying = self._read_below(num_frozen)
        thawed = thawed_by(self.task.model.model, num_frozen, layers=self.row_blocks)
        return {name: p for name, p in thawed.items() if p not in staying}

    def taken_over(self, loader: Any) -> AbstractContextManager[None]:
        """Have iterations of the loader that begin within the block give cached batches."""
        base = base_of(loader)
        # Persistent workers keep their first seeds.
        is_first = self.epoch == 0 and base._iterator is None
        draws = not base.persistent_workers or is_first
        return giving_indices(base, self.announce, self.made, draws=draws)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of an epoch of the loader."""
        with self.taken_over(loader):
            batches = iter(loader)
            first = list(islice(batches, 1))
        yield from chain(first, batches)

    def marked(self, loader: Any) -> Iterator[Any]:
        """Yield the loader's own batches; until it is known, these say what the model is given."""
        for batch in loader:
            yield batch if self.forward.is_confirmed else self._whole_form.to_learn_from(batch)

    def announce(self, drawn: Sequence[list[int]]) -> None:
        """Take note of all batches of an epoch."""
        if self._base.num_workers and not self._base.persistent_workers:
            self.feed.end_workers()  # As the loader's own begin anew with each epoch.
        self._notice_edits()
        self._to_come.clear()  # The loop may have left the last epoch early.
        self._to_come.extend(_Coming(self.epoch, own, self._ids(own)) for own in drawn)

    def _notice_edits(self) -> None:
        """Use no row, and no batch, of samples that were edited in memory since."""
        if not self._data.changed():
            return
        self._edit_epoch = self.epoch
        self.feed.prefix.begin_edition()
        if self.depth:
            _LOGGER.warning(
                "samples were edited in memory since the last epoch: what frozen blocks return is "
                "computed anew"
            )

    def _ids(self, indices: list[int]) -> Tensor:
        """Return samples' places; those that a sampler counts from the end, from the beginning."""
        return torch.tensor([i if i >= 0 else i + self._num_samples for i in indices])

    def _fetches_to_come(self) -> Iterator[tuple[int, Tensor]]:
        """Yield what the feed will be asked for: of each batch its columns, in turn."""
        for coming in tuple(self._to_come):
            for column in range(len(self._calls)):
                yield coming.epoch, self._pieces.ids(coming.ids, column)

    def made(self, indices: list[int]) -> Any:
        """Return a batch in the loader's form, whose entries know its rows."""
        self.take_up_columns()
        to_come = self._to_come
        # Some may have been skipped, as where a run is resumed.
        while to_come and to_come[0].indices != indices:
            to_come.popleft()
        due = to_come[0] if to_come else _Coming(self.epoch, indices, self._ids(indices))
        ids, epoch = due.ids, due.epoch
        is_made_of_rows = self._form.is_whole and not self._reads
        read = None if is_made_of_rows else self._read_as_loaded(indices, epoch)
        own = {} if read is None else self._form.entries_of(read)
        fetches, batches = list[dict[str, Tensor]](), list[RowBatch]()
        entries: dict[str, Tensor] = {}
        for column, call in enumerate(self._calls):
            fetched = self._fetch(ids, epoch, column)
            if own:
                given = {parameter: own[name] for name, parameter in call.parameters.items()}
                fetched = {**given, **{n: t for n, t in fetched.items() if n == HIDDEN}}
            fetches.append(fetched)
            number = batches[0].number if batches else None
            batches.append(self._row_batch(fetched, ids, epoch, call, number))
            inputs = batches[-1].entries()
            entries = {name: inputs[one] for name, one in call.parameters.items()} | entries
        for name in [name for name in self._form.names if name not in entries]:
            rows = self._form.rows[name]
            column = self._pieces.column_of(rows) or 0
            value = own[name] if own else fetches[column][self._collation.known_as(name)]
            if len(value) != len(ids) * rows.num:  # Each piece of a sample has it.
                value = value[self._pieces.columns[column].places(len(ids))[:, 0]]
            if not self.forward.is_confirmed:  # The loop may give the model any of them.
                value = batches[column].entry(name, value)
            entries[name] = value
        if self._rounds and batches[0].rows is not None:
            self._rounds = False
            self._compare_rounded(ids, epoch)
        if to_come:
            to_come.popleft()
        return self._form.with_entries(entries, read)

    def _read_as_loaded(self, indices: list[int], epoch: int) -> Any:
        """Read a batch as the loader does."""
        with own_random_numbers(self.device):
            return self._whole.collated(indices, view=self.feed.view(epoch))

    def _fetch(self, ids: Tensor, epoch: int, column: int) -> dict[str, Tensor]:
        """Fetch the rows that a column has of some samples."""
        own = self._pieces.ids(ids, column)
        self.forward.refuse_replaced()
        with torch.inference_mode(False):
            # Rows of a model that was changed are not used, as the forward finds.
            batch = self.feed.take_read(own, epoch=epoch)
            if batch is None:
                self._notice_changes()
                with own_random_numbers(self.device):
                    batch = self.feed.fetch(own, epoch=epoch, keeps=True)
        return batch

    def _notice_changes(self) -> None:
        """Use no row that was made before the user has changed the model by hand."""
        watch = self.forward.watch
        self.forward.refuse_replaced()
        if self.depth and watch.changed():
            watch.renew()
            _LOGGER.warning(
                "attributes or hooks of frozen modules were changed: what they return is computed "
                "anew"
            )
            self.feed.prefix.begin_edition()

    def _compare_rounded(self, ids: Tensor, epoch: int) -> None:
        """Log what rounded rows change of a batch."""
        with own_random_numbers(self.device), torch.inference_mode(False):
            own = self._pieces.ids(ids, 0)
            batches = [self.feed.computed_rows(own, rounded=one) for one in (False, True)]
            targets = {n: batches[0][n] for n in self.task.model.targets if n in batches[0]}
            exact, rounded = (self._row_batch(batch, ids, epoch) for batch in batches)
            with self._by_ourselves():
                compare_rounded(
                    self.task,
                    exact=exact,
                    rounded=rounded,
                    targets=targets,
                    tells=self.world.is_main,
                )

    def _renew(self, batch: RowBatch, call: LoopCall) -> None:
        """Bring a batch, given before the blocks have changed, to a column's rows of today."""
        if batch.epoch < self._edit_epoch:
            batch.rows, batch.depth, batch.call = None, self.depth, call
            batch.stamp = self.feed.prefix.stamp
            return
        column = next(c for c, one in enumerate(self._calls) if one.has_rows_of(call))
        self._to_come.appendleft(_Coming(batch.epoch, batch.ids.tolist(), batch.ids))
        try:
            fetched = self._fetch(batch.ids, batch.epoch, column)
        finally:
            self._to_come.popleft()
        batch.rows, batch.depth, batch.call = fetched.get(HIDDEN), self.depth, call
        batch.stamp = self.feed.prefix.stamp

    def _read_inputs(self, batch: RowBatch) -> Mapping[str, Tensor]:
        if batch.epoch < self.epoch:
            self._notice_edits()
        if batch.epoch < self._edit_epoch:
            raise ValueError(
                "a batch of an earlier epoch was kept, and not read; since then samples were "
                "edited in memory, and what it held is not known. Give reads= the names of the "
                "model's inputs, or keep no batches"
            )
        return self._form.entries_of(self._read_as_loaded(batch.ids.tolist(), batch.epoch))

    def _row_batch(
        self,
        fetched: dict[str, Tensor],
        ids: Tensor,
        epoch: int,
        call: LoopCall | None = None,
        number: int | None = None,
    ) -> RowBatch:
        """Return a batch's inputs and rows; what rows make needless was not read."""
        inputs, sides = self.task.model.inputs, self._sides
        rows = fetched.get(HIDDEN)
        not_read = frozenset(name for name in inputs if name not in fetched)
        entries = {name: fetched.get(name, self._example[name]) for name in (*inputs, *sides)}
        number = next(self._numbers) if number is None else number
        num, stamp = len(next(iter(fetched.values()))), self.feed.prefix.stamp
        call = call or self._calls[0]
        return RowBatch(number, ids, num, epoch, self.depth, rows, entries, not_read, call, stamp)

    @property
    def stats(self) -> CacheStats:
        """Return the cache's counts and times since they were last forgotten."""
        self._note_stats()
        return self._stats

    def forget_stats(self) -> None:
        """Begin to count anew."""
        self._note_stats()
        self._stats = CacheStats()

    def _note_stats(self) -> None:
        # A cache of another depth begins to count anew.
        self._stats += self.feed.take_stats()

    def close(self) -> None:
        """Give the model its own forward back, and free the rows."""
        self._note_stats()
        self.forward.close()
        self.feed.close()
        self.world.close()


@final
@dataclass(frozen=True)
class _Coming:
    """Name a batch to come: its epoch, what its sampler has drawn, and the samples, (B,)."""

    epoch: int
    indices: list[int]
    ids: Tensor


def _refuse_prompts(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", {})
    if any(getattr(one, "is_prompt_learning", False) for one in configs.values()):
        raise ValueError(
            "the model puts prompts that it learns before each sample, so that frozen blocks "
            "return something else at every step: there is nothing to cache"
        )


def _expected_call(model: nn.Module, form: BatchForm) -> LoopCall:
    call = guessed_call(model, form.names)
    if call is None:
        raise ValueError(
            f"batches have the entries {list(form.names)}, and the model takes "
            f"{list(names_of(model).inputs)}: which is given which cannot be told by their names. "
            "Name entries as the model does, or use `attach` in a loop of your own, which learns "
            "it from the first forward"
        )
    return call


def _pieces(form: BatchForm, calls: tuple[LoopCall, ...]) -> Pieces:
    """Number the rows that samples have in what a loop gives its model."""
    for call in calls:
        if len({form.rows[name] for name in call.parameters}) > 1:
            raise ValueError(
                f"the model is given {[*call.parameters]} at once, and samples have other numbers "
                "of rows in some than in others, or in another order: collate them alike"
            )
    return Pieces(tuple(form.rows[next(iter(call.parameters))] for call in calls))


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
    )


def _refuse_sharded(model: nn.Module) -> None:
    # By its name: importing that class takes half as long as importing torch.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ValueError(
            "FSDP gathers a block's weights on all ranks at once, but ranks compute rows for "
            "unequal numbers of samples, and would wait for each other: use "
            "DistributedDataParallel, or freeze without rows by freeze.apply"
        )

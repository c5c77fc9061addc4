"""Freeze and cache within a training loop of one's own.

    cached = attach(model, freeze=[0, 4, 8])
    for _ in range(3):
        for batch in cached.epoch(loader):            loader: a DataLoader, as before
            loss = model(**batch).loss                starts above the frozen blocks
            loss.backward(); optimizer.step(); optimizer.zero_grad()

`epoch` has the loader draw its samples' indices. Rows are read for samples that have one; others
are loaded, run through the frozen blocks, and stored. Optimizer, scheduler, autocast, clipping,
accumulation and wrappers stay as they are.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autocache import CacheStats
from freeze import FreezeChoice, FreezeSchedule, chosen_policy, find_layers
from pipetransformer.feed import own_random_numbers
from pipetransformer.loop.batches import (
    BatchForm,
    base_of,
    begun_within,
    collating_kept,
    giving_indices,
)
from pipetransformer.loop.forward import LoopCall, guessed_call, learning
from pipetransformer.loop.policy import EpochPolicy, FreezeAdvice
from pipetransformer.loop.rows import (
    PARTS,
    EvaluationRows,
    RowService,
    check_settings,
    settings_of_parts,
)
from pipetransformer.model import refuse_no_module, refuse_wrapper
from pipetransformer.report import SavedTime

_LOGGER = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def attach(
    model: nn.Module,
    *,
    freeze: FreezeChoice | None = None,
    parts: Sequence[str | nn.Module] = (),
    optimizer: Optimizer | None = None,
    num_epochs: int | None = None,
    dry_run: bool = False,
    **settings: Any,
) -> CachedLoop:
    """Have a model's forward start above its frozen blocks, on samples whose rows are cached.

    Args:
        model: what the loop calls, or what DDP or torch.compile wrap.
        freeze: how many blocks are frozen, by epoch; a number holds for all. Or a policy, a
            function of a `FreezeContext`, or a policy's name: it is asked before each epoch.
            `freeze_bottom` takes its place.
        parts: alone, or beside `freeze`, whose blocks are others: modules, or their names in the
            model, that are frozen from the first epoch on and stay in eval mode. What they return
            for a sample is its row: tensors of any number, one entry a sample. Any module will
            do: a tower, an encoder, a backbone, or one that is not in the model, such as a
            teacher, by itself.
        optimizer, num_epochs: of the loop; policies need them to know how far it is.
        dry_run: whether nothing freezes, so that the loop's numbers are as without `attach`. A
            warning at `close` says what would have frozen when, and what that would save.
        settings: `cache_folder`, `cache_limit_bytes`, `cache_dtype`, `cache_device`,
            `cache_check`, `precision`, `seed` and `tied_weights`, as in `TrainConfig`. Where the
            loop computes in autocast, give its dtype as `precision`. `reads` names entries that it
            looks at; `ignores_padding=True` promises that it reads nothing that the model returns
            of padding, as where it pools by the mask. `cache=False` freezes without rows; where
            it is not given, parts have rows if a usual batch shows that these save a tenth of a
            step. An INFO log says what they take, and from which epoch on they pay. With
            `release=True` parts leave their device once every sample has its row.
    Raises:
        TypeError: the model is a wrapper of torch's, or no model.
        ValueError: a setting is unknown or not allowed, or a policy lacks what it needs. A model
            without a row of blocks is refused where the first epoch begins, as its samples are
            needed to run it.
    """
    check_settings(settings, has_parts=bool(parts))
    refuse_no_module(model)
    refuse_wrapper(model)
    if parts:
        if dry_run:
            raise ValueError("parts= are frozen from the start, and a dry run freezes nothing")
        model, settings = settings_of_parts(model, parts, settings, alone=freeze is None)
        freeze = 0 if freeze is None else freeze
    if freeze is None or isinstance(freeze, nn.Module):
        raise ValueError(
            "give freeze=, how many of the lower blocks are frozen, or parts=, modules that are"
        )
    policy = chosen_policy(freeze)
    if isinstance(policy, FreezeSchedule) and not dry_run:
        return CachedLoop(model, policy.at, settings)
    if optimizer is None or num_epochs is None or num_epochs < 1:
        raise ValueError(
            f"{policy.name}{' in a dry run' if dry_run else ''} may look at what the "
            "optimizer does, and at how far the loop is: give attach optimizer=, and num_epochs= "
            "of at least 1"
        )
    if dry_run:
        _refuse_no_list(model)
    watching = EpochPolicy(policy, optimizer, num_epochs, dry_run=dry_run)
    return CachedLoop(model, watching, settings)


def _refuse_no_list(model: nn.Module) -> None:
    try:
        find_layers(model)
    except ValueError as error:
        # It speaks of an argument that `attach` has not.
        what = str(error).partition("; give layers=")[0]
        raise ValueError(f"{what}; attach the part of the model that has one such list") from error


@final
class _Epoch(Iterator[Any]):
    """Give an epoch's batches, once; its length is the loader's."""

    def __init__(self, batches: Generator[Any, None, None], loader: DataLoader[Any]) -> None:
        self._all, self._loader = batches, loader

    def __next__(self) -> Any:
        return next(self._all)

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """Leave the epoch."""
        self._all.close()


@final
class CachedLoop:
    """Give a loop its batches; see `attach`. Use it as a context manager, or call `close`.

    Attributes:
        num_frozen: blocks that the present epoch, or the last one, has frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        freezes: Callable[[int], int] | EpochPolicy,
        settings: Mapping[str, Any],
    ) -> None:
        self._model, self._freezes, self._settings = model, freezes, dict(settings)
        self._num_begun = self.num_frozen = 0
        self._rows: RowService | None = None
        self._saved = SavedTime()
        self._evaluations = EvaluationRows(model, self._settings)
        self._within: object = None  # An epoch that has begun, and not ended.
        self._is_closed = self._has_told = False
        # At `close`, or where the loop is dropped.
        self._never_begun = weakref.finalize(
            self,
            _LOGGER.warning,
            "attach was called, but no batch came from its epoch, so nothing was frozen: let the "
            "loop run over cached.epoch(loader) in the place of loader",
        )

    @property
    def stats(self) -> CacheStats:
        """Return what the running epoch has found so far, or the last one: hits and more.

        A hit is a row that was read, also where the forward then had no use for it.
        """
        return CacheStats() if self._rows is None else self._rows.stats

    @property
    def advice(self) -> FreezeAdvice | None:
        """Return what the policy has said so far, and why; None where numbers say what freezes."""
        return self._freezes.advice if isinstance(self._freezes, EpochPolicy) else None

    def freeze_bottom(self, num_frozen: int) -> None:
        """Freeze this many blocks from the next epoch on. Parts stay frozen until `close`.

        Raises:
            ValueError: this is a dry run, or nothing but parts is frozen and nothing would thaw.
        """
        if PARTS in self._settings and not num_frozen and not self.num_frozen:
            raise ValueError(
                "freeze_bottom counts blocks beside parts=, and none is frozen; parts stay frozen "
                "until `close`: close this loop, thaw them by requires_grad_, and go on without it"
            )
        if isinstance(self._freezes, EpochPolicy) and self._freezes.dry_run:
            raise ValueError("a dry run freezes nothing; attach the model without dry_run=True")
        self._stop_watching()
        self._freezes = lambda _: num_frozen

    def epoch(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Freeze what this epoch freezes, and yield the loader's batches. Collective under DDP.

        Batches are as the loader makes them. Images of samples that hit are not read: a loop may
        move them, cast them and take some, and give them to the model, whose forward starts above
        the frozen blocks. A forward that is given anything else runs from its start.

        Raises:
            TypeError: the loader is no DataLoader, or another process reads for it.
            ValueError: the loader has no sampler of batches, the model cannot be cut, or something
                is computed of images that were not read.
        """
        return _Epoch(self._batches(loader), loader)

    def evaluation(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield another loader's batches, as a validation set's, from rows. Collective under DDP.

        It may interrupt an epoch. Nothing freezes: rows are of what is frozen now; before the
        first epoch there are none. Rows of the last four data sets stay, each within
        `cache_limit_bytes`.

        Raises:
            TypeError, ValueError: as `epoch`; or another evaluation has not ended.
        """
        return _Epoch(self._evaluated(loader), loader)

    def _evaluated(self, loader: DataLoader[Any]) -> Generator[Any, None, None]:
        self._refuse_closed()
        self._refuse_evaluating()
        training, evaluations = self._rows, self._evaluations
        if training is None or not evaluations.may_serve(loader, training):
            yield from loader
            return
        rows = evaluations.begin(loader, training)
        epoch = rows.epoch
        try:
            for batch in rows.batches(loader) if rows.may_serve else loader:
                yield batch
                if evaluations.now is not rows or rows.epoch != epoch:
                    raise ValueError(
                        "this evaluation has ended, as the loop has begun an epoch, or was closed"
                    )
        finally:
            if evaluations.now is rows and rows.epoch == epoch:
                evaluations.end()

    def fill(self, loader: DataLoader[Any]) -> CacheStats:
        """Compute the rows that samples lack, without training, and return how many had some.

        Of several processes each computes a share. With `cache_keep=True` later runs read them. A
        bar on stderr shows the rate, the bytes, and when it ends.

        Raises:
            TypeError, ValueError: as `epoch`; or a policy decides what freezes, or rows cannot be
                kept.
        """
        self._never_begun.detach()
        self._refuse_closed()
        self._refuse_evaluating()
        if self._within is not None:
            raise ValueError("an epoch is under way: fill rows before it, or behind it")
        if isinstance(self._freezes, EpochPolicy):
            raise ValueError("a policy decides what freezes: rows are filled of parts= or numbers")
        rows = self._start(loader)
        if rows is None:
            raise ValueError(
                "which entry of a batch the model is given cannot be told by their names: run an "
                "epoch, whose first forward shows it, or name entries as the model does"
            )
        self._begin(rows, loader)
        self._num_begun -= 1
        if not rows.may_serve:
            raise ValueError(
                "there is nothing to fill: nothing is frozen in the coming epoch, or rows of it "
                "cannot be kept, as a warning says"
            )
        with torch.inference_mode(False):
            rows.fill()
        rows.forward.is_awaited = False
        return rows.stats

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ValueError("this loop was closed; attach the model anew")

    def _refuse_evaluating(self) -> None:
        if self._evaluations.now is not None:
            raise ValueError("an evaluation is under way: end it, or close its iterator")

    def _batches(self, loader: DataLoader[Any]) -> Generator[Any, None, None]:
        self._never_begun.detach()
        self._refuse_closed()
        self._evaluations.end()  # One may have been left, and its iterator kept.
        own = self._within = object()
        try:
            with closing(self._served(loader)) as batches:
                yield from self._timed(batches)
        finally:
            if self._within is own:
                self._within = None

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches; a step is over where the next batch is asked for."""
        start = time.perf_counter()
        for batch in batches:
            yield batch
            end = time.perf_counter()
            if (rows := self._rows) is not None:
                self._saved.add(end - start, 1, depth=rows.num_still, rows=rows.take_stats())
            start = end

    def _served(self, loader: DataLoader[Any]) -> Generator[Any, None, None]:
        if isinstance(self._freezes, EpochPolicy) and self._freezes.dry_run:
            self._ask(self._freezes, loader, None)
            self._num_begun += 1
            yield from loader
            return
        rows = self._start(loader)
        if rows is None:
            yield from self._learning(loader)
            return
        rows.take_up_columns()
        epoch = self._begin(rows, loader)
        try:
            for batch in rows.batches(loader) if rows.may_serve else rows.marked(loader):
                yield batch
                if rows.may_serve and (self._is_closed or rows.epoch != epoch):
                    raise ValueError(
                        "this epoch has ended, as the loop was closed or has begun another epoch"
                    )
        finally:
            self._end(rows, epoch)

    def _begin(self, rows: RowService, loader: DataLoader[Any]) -> int:
        # What is kept serves loops in any mode.
        with torch.inference_mode(False):
            self.num_frozen = self._freeze(rows, loader)
        rows.forget_stats()
        rows.epoch = epoch = self._num_begun
        self._num_begun += 1
        rows.forward.is_awaited, rows.forward.num_served = rows.may_serve, 0
        return epoch

    def _end(self, rows: RowService, epoch: int) -> None:
        if rows.epoch == epoch and not sys.is_finalizing():
            rows.forward.is_awaited = False
            rows.release()
            if self.stats.hits and not rows.forward.num_served and not self._has_told:
                self._has_told = True
                _LOGGER.warning(
                    "rows were read, but no forward of the attached model has used one: let the "
                    "loop call the model itself (not its `forward`, nor a part of it)"
                )

    def _learning(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield an epoch whose first forward says what the model is given.

        That forward freezes, too. Where no workers read, the batches behind it have rows already.
        """
        base = base_of(loader)
        form, drawn = self._form(base), list[list[int]]()
        dataset, collate_fn = base.dataset, base.collate_fn  # They are swapped meanwhile.

        def begin(call: LoopCall) -> None:
            with torch.inference_mode(False):
                self._rows = RowService(self._model, loader, self._settings, call=call)
            weakref.finalize(self, self._rows.close)
            self._rows.forward.is_confirmed = self._rows.sees_first = True
            self._begin(self._rows, loader)
            self._rows.announce(drawn)

        def make(indices: list[int]) -> Any:
            rows = self._rows
            if rows is not None:
                rows.take_up_columns()
                rows.forward.is_awaited = rows.may_serve
                if rows.may_serve:
                    return rows.made(indices)
            batch = collate_fn([dataset[index] for index in indices])
            return batch if rows is not None else form.to_learn_from(batch)

        with learning(self._model, begin, of_parts=PARTS in self._settings):
            if base.num_workers:
                for batch in loader:
                    yield batch if self._rows is not None else form.to_learn_from(batch)
            else:
                begins = giving_indices(base, drawn.extend, make, draws=True)
                yield from begun_within(begins, loader)
        if self._rows is None:
            raise ValueError(
                "no forward of the model was given anything of a batch in this epoch, so nothing "
                "was frozen: attach what the loop calls, with tensors of the loader's batches"
            )
        self._end(self._rows, self._rows.epoch)

    def _form(self, base: DataLoader[Any]) -> BatchForm:
        return BatchForm.of(base, has_bundles=PARTS in self._settings)

    def _freeze(self, rows: RowService, loader: DataLoader[Any]) -> int:
        if isinstance(self._freezes, EpochPolicy):
            return self._ask(self._freezes, loader, rows)
        num_frozen = self._freezes(self._num_begun)
        rows.set_depth(num_frozen)
        return num_frozen

    def _ask(self, policy: EpochPolicy, loader: DataLoader[Any], rows: RowService | None) -> int:
        return policy.begin_epoch(self._num_begun, self._model, len(loader), rows=rows)

    def _start(self, loader: DataLoader[Any]) -> RowService | None:
        """Return what serves the loop; None where its first forward must tell how."""
        if self._rows is None:
            base = base_of(loader)
            with collating_kept(base.dataset, base.collate_fn), torch.inference_mode(False):
                with own_random_numbers(_CPU):
                    names = self._form(base).names
                if guessed_call(self._model, names) is None:
                    return None
                self._rows = RowService(self._model, loader, self._settings)
            weakref.finalize(self, self._rows.close)
        self._rows.refuse_another(loader)
        return self._rows

    def close(self) -> None:
        """Have the forward run from its start again, and free the rows; blocks stay frozen.

        An INFO log says what the epochs took, and what freezing and rows saved of it.
        """
        self._never_begun()
        self._stop_watching("" if self._is_closed else self._took())
        self._is_closed = True
        self._evaluations.close()
        if self._rows is not None:
            self._rows.close()

    def _took(self) -> str:
        if (rows := self._rows) is None:
            return ""
        return self._saved.line(self._saved.seconds, rows.num_of_others)

    def _stop_watching(self, took: str = "") -> None:
        if isinstance(self._freezes, EpochPolicy):
            self._freezes.close(took)
        elif took and self._rows is not None and self._rows.world.is_main:
            _LOGGER.info("%s", took)

    def __enter__(self) -> CachedLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

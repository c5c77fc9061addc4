"""Freeze what a policy says within another's trainer, and serve rows of what is frozen.

trainer's hook             here
training begins            begin_rows: look at the model and the samples
an epoch begins            take_over: the loader gives cached batches
its first batch is there   let_go: the loader is as it was
a look at the weights      freeze, and have rows of that depth
an evaluation              within `evaluating`: it has rows of its own
training ends              end_rows, and publish what it took
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from autocache import CacheStats
from freeze import FreezeChoice
from pipetransformer.loop.policy import FreezeObserver
from pipetransformer.loop.rows import (
    CACHE,
    MOST_EVALUATIONS,
    READS_ALL,
    EvaluationRows,
    RowService,
    check_settings,
    settings_of_parts,
)
from pipetransformer.report import SavedTime

_LOGGER = logging.getLogger(__name__)


class ServingObserver(FreezeObserver):
    """Be what the callbacks of trainers share; each brings its trainer's hooks.

    Args:
        freeze: a number of blocks, one for each epoch, a policy's name, a policy, or a function.
        parts: in its place, or beside it; see `attach`.
        every_steps: optimizer steps between two questions to the policy; None asks it before each
            epoch. It is asked before the first step, too.
        cache: whether rows are kept; without, blocks only freeze. None keeps rows where the model
            and its samples allow, else a warning says why not; those of parts where they save a
            tenth of a step. With True what does not allow rows is refused.
        dry_run: whether nothing freezes, and the training's numbers stay as without the callback.
            At its end a warning says what would have frozen when, and what that would save.
        layers: the model's blocks, bottom first; None finds them.
        settings: those of `attach`.
    """

    def __init__(
        self,
        freeze: FreezeChoice | None = None,
        *,
        parts: Sequence[str | nn.Module] = (),
        every_steps: int | None = None,
        cache: bool | None = None,
        dry_run: bool = False,
        layers: Sequence[nn.Module] | None = None,
        **settings: Any,
    ) -> None:
        check_settings(settings, has_parts=bool(parts))
        if settings and cache is False:
            raise ValueError(
                f"cache=False keeps no rows, so that {', '.join(sorted(settings))} would have no "
                "effect; leave that out"
            )
        if not parts and freeze is None:
            raise ValueError("give freeze=, what of the blocks freezes when, or parts=")
        if parts and (dry_run or cache is False or every_steps is not None or layers is not None):
            raise ValueError(
                "parts= are frozen and have rows from the start, and blocks beside them freeze "
                "between epochs: leave dry_run=, cache=False, every_steps= and layers= out"
            )
        self.watches = freeze is not None
        super().__init__(
            0 if freeze is None else freeze,
            every_steps=every_steps,
            dry_run=dry_run,
            layers=layers,
        )
        self.keeps_outputs = cache is not False
        self.makes_rows = self.keeps_outputs and not dry_run
        self._settings, self._parts = {**settings, CACHE: cache}, tuple(parts)
        self._swap, self._evaluation_swap = ExitStack(), ExitStack()
        self._after_training = ExitStack()
        self._evaluations: EvaluationRows | None = None
        self._evaluated = dict[int, RowService]()
        self._has_told = False
        self._stats, self._num_of_others = CacheStats(), 0
        self._saved, self._start = SavedTime(), time.perf_counter()

    @property
    def stats(self) -> CacheStats:
        """Return what all epochs of the training have found so far, or of the last: hits and more.

        A hit is a row that was read, also where the forward then had no use for it.
        """
        return self._stats if self._rows is None else self._rows.stats

    def forget(self) -> None:
        """Forget a training that was watched before; call it before `begin`."""
        super().forget()
        self._saved = SavedTime()

    def end_step(self, step: int) -> None:
        """Note that `step` steps are done, and what the last one took; see `FreezeObserver`."""
        end = time.perf_counter()
        found = CacheStats() if self._rows is None else self._rows.take_stats()
        depth = 0 if self.dry_run else len(self._since) + bool(self._parts)
        self._saved.add(end - self._start, 1, depth=depth, rows=found)
        self._start = end
        super().end_step(step)

    def end_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note an evaluation's results, for policies; it is no part of a step."""
        super().end_evaluation(step, metrics)
        self._start = time.perf_counter()

    def publish(self, took: str = "") -> None:
        """Watch no more, and log what was seen, and what the training took and saved."""
        saved = self._saved.line(self._saved.seconds, self._num_of_others)
        super().publish(took or saved)

    def begin_rows(
        self,
        model: nn.Module,
        loader: Any,
        *,
        precision: str | None,
        parts: Sequence[str | nn.Module] | None = None,
    ) -> None:
        """Look at a model and the samples that it will train on; freeze its parts. Collective.

        Args:
            precision: of the trainer's autocast.
            parts: of the model, where they are others than were named at first.
        """
        self.end_rows()  # Of a training that has failed.
        asked = {} if precision is None else {"precision": precision}
        settings = {**asked, **self._settings}
        if self._parts:
            parts = self._parts if parts is None else parts
            is_alone = not self.watches
            model, settings = settings_of_parts(model, parts, settings, alone=is_alone)
        try:
            # Losses of trainers leave out what labels do: padding.
            self._rows = RowService(model, loader, settings, keeps_to_labels=True)
        except (TypeError, ValueError) as error:
            if self._settings[CACHE] or self._parts:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{error}. Or freeze without rows: cache=False") from error
            # A script that trained before must not fail for the want of rows.
            _LOGGER.warning("no cache, blocks freeze without rows: %s", error)
            self.keeps_outputs = False
            return
        self.keeps_outputs = True
        self._at_the_end = weakref.finalize(self, self._rows.close)
        # Metrics may look at all entries, and at all that the model returns.
        self._evaluations = EvaluationRows(model, {**settings, READS_ALL: True})
        if not self.watches:
            self._rows.set_depth(0)

    def take_over(self, loader: Any) -> None:
        """Have the epoch that begins now give cached batches."""
        self.let_go()
        self._start = time.perf_counter()
        # Without rows the trainer's own workers read as ever.
        if self._rows is not None and self._rows.may_ever_serve:
            self._rows.refuse_another(loader)
            self._swap.enter_context(self._rows.taken_over(loader))
            self._rows.epoch += 1

    def let_go(self) -> None:
        """Give the loader what it had; the iterator that it has begun goes on."""
        self._swap.close()

    def serve_evaluations(
        self, owner: Any, name: str, around: Callable[..., AbstractContextManager[None]]
    ) -> None:
        """Have a trainer's method, which evaluates, run within `evaluating` from now on.

        Args:
            around: returns it, by what the method is given.
        """
        run = getattr(owner, name)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs):
                return run(*args, **kwargs)

        # On the object, as a method that somebody else has put there, which comes back.
        own = {name: vars(owner)[name]} if name in vars(owner) else {}
        vars(owner)[name] = evaluate
        self._after_training.callback(vars(owner).update, own)
        self._after_training.callback(vars(owner).pop, name)

    @contextmanager
    def evaluating(self, *loaders: Any, keeps_to_labels: bool = False) -> Iterator[None]:
        """Have iterations of other loaders that begin within the block give cached batches.

        Where several follow each other, `turn_to` says which one's batch comes next.

        Args:
            keeps_to_labels: whether nothing but the model's own loss is read.
        """
        training, evaluations = self._rows, self._evaluations
        if training is None or evaluations is None or evaluations.now is not None:
            yield
            return
        with self._evaluation_swap:
            self._evaluation_swap.callback(evaluations.end)
            self._evaluation_swap.callback(self._evaluated.clear)
            for place, loader in enumerate(loaders[:MOST_EVALUATIONS]):
                try:
                    if not evaluations.may_serve(loader, training):
                        continue
                    rows = evaluations.begin(loader, training, keeps_to_labels=keeps_to_labels)
                except Exception as error:  # Any: a collate_fn may fail as it likes.
                    self._tell_once(error)
                    continue
                if rows.may_serve:
                    swap = self._evaluation_swap.enter_context(ExitStack())
                    # Once it has begun, looks at the model read samples by the loader's own.
                    swap.enter_context(rows.taken_over(loader, begun=swap.close))
                    self._evaluated[place] = rows
            yield

    def turn_to(self, place: int) -> None:
        """Serve batches of that loader from now on."""
        if self._evaluations is not None and place in self._evaluated:
            self._evaluations.turn_to(self._evaluated[place])

    def _tell_once(self, error: Exception) -> None:
        if not self._has_told:
            self._has_told = True
            _LOGGER.warning("evaluations run what is frozen, as they cannot have rows: %s", error)

    def end_rows(self) -> None:
        """Have the model run from its start again, and free the rows."""
        self.let_go()
        self._after_training.close()
        if self._evaluations is not None:
            self._evaluations.close()
            self._evaluations = None
        if self._rows is not None:
            self._stats, self._num_of_others = self._rows.stats, self._rows.num_of_others
            self._at_the_end()
            self._rows = None

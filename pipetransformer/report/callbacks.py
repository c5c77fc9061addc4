"""Say which events a callback hears of, and when.

Call the callbacks of an event, and agree among the ranks on what came of it.

rank 0    on_step_end: fine                    |         | CallbackError: rank 1: ...
rank 1    on_step_end: raises, or calls stop() | agree   | CallbackError, from the cause
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from autodp import broadcast_json, gather_json
from pipetransformer.checkpoint import Saved
from pipetransformer.elastic import Change, Decision
from pipetransformer.errors import CallbackError
from pipetransformer.feed import Timeline
from pipetransformer.processes import World
from pipetransformer.report.fit_report import FitReport
from pipetransformer.stage import StepResult


class Callback:
    """Hear of a run's events; override those of interest.

    Every rank calls the same events in the same order, so that a callback may use what is
    collective (`evaluate`, `state_dict`, `save_pretrained`), on all ranks alike. What only one
    process should do stands behind `if trainer.is_main_process`. `trainer.stop()` ends the run
    after the step. What a callback raises ends the run on all ranks with a `CallbackError`.

        fit     on_train_begin  [ decision  step  evaluation  checkpoint ]...  on_train_end
                                  on_freeze | on_step_end | on_evaluate | on_save
                                  on_transition

    The trainer is a `Trainer`, at the state after the event.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Hear that `fit` begins; a resumed run stands where it goes on."""

    def on_freeze(self, trainer: Any, decision: Decision) -> None:
        """Hear that another number of layers is frozen from now on."""

    def on_transition(self, trainer: Any, change: Change) -> None:
        """Hear that layers were frozen or moved; the start's pipeline is a transition, too."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Hear of a step; `trainer.global_step` counts it already."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Hear what an evaluation found: one that was due, or a call of `evaluate`."""

    def on_save(self, trainer: Any, folder: Path) -> None:
        """Hear that a checkpoint is complete: some steps later, as it is written meanwhile."""

    def on_log(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Hear on rank 0 alone of each record, as records.jsonl gets it; use nothing collective.

        What it raises ends the run at the next event.
        """

    def on_train_end(self, trainer: Any, report: FitReport) -> None:
        """Hear that `fit` ends; rank 0's model has its weights."""


def check_callbacks(callbacks: Any) -> None:
    """Raise a TypeError for what is no Callback in a list; the list itself is a setting."""
    for index, one in enumerate(callbacks if isinstance(callbacks, (list, tuple)) else ()):
        if not isinstance(one, Callback):
            raise TypeError(f"callbacks[{index}] is {one!r}; give instances of Callback")


@final
class Events:
    """Tell a trainer's callbacks, in their order, what happens; without any, nothing is sent.

    Built by all ranks together.

    Raises:
        ValueError: on every rank: ranks have other callbacks.
    """

    def __init__(
        self, trainer: Any, callbacks: Sequence[Callback], *, world: World, timeline: Timeline
    ) -> None:
        # The trainer holds this: a circle would keep its memory until somebody collects garbage.
        self._trainer, self._callbacks = weakref.ref(trainer), tuple(callbacks)
        self._world, self._timeline = world, timeline
        self._saves = trainer.config.saves
        self._failure: tuple[str, Exception] | None = None
        self.wants_stop = False  # Of this rank alone.
        # An event is collective: ranks that heard of different ones would wait for each other.
        names = gather_json([type(one).__name__ for one in callbacks], group=world.group)
        if any(own != names[0] for own in names):
            raise ValueError(
                f"callbacks are {names}, rank by rank; give all ranks the same, and let one do "
                "its work where trainer.is_main_process"
            )

    def ask_to_stop(self) -> None:
        """Have all ranks end the run, as soon as they agree on it."""
        self.wants_stop = True

    def tell(self, event: Callable[..., None], *facts: Any) -> None:
        """Call a method of `Callback` on all callbacks. Collective, where there are any.

        Raises:
            CallbackError: on every rank: one raised; the message names its rank.
        """
        if self._callbacks:
            self._call(event, *facts)
            self._agree()

    def tell_of_change(self, change: Change | None) -> None:
        """Tell of what happened between two steps, if anything did. Collective."""
        if change is None:
            return
        num_before = change.before.num_frozen if change.before else 0
        if change.decision.num_frozen != num_before:
            self.tell(Callback.on_freeze, change.decision)
        if change.is_transition:
            self.tell(Callback.on_transition, change)

    def tell_of_save(self, saved: Saved | None) -> None:
        """Tell of the checkpoint that rank 0 knows to be complete, if there is one. Collective."""
        if self._callbacks and self._saves:
            folder = str(saved.folder) if saved is not None and saved.num_bytes else None
            folder = broadcast_json(folder, group=self._world.group)
            if folder is not None:
                self.tell(Callback.on_save, Path(folder))

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand over a record on rank 0; what is raised then waits for the next event."""
        self._call(Callback.on_log, record)

    def _call(self, event: Callable[..., None], *facts: Any) -> None:
        if self._failure is not None:
            return
        for callback in self._callbacks:
            try:
                getattr(callback, event.__name__)(self._trainer(), *facts)
            except Exception as error:
                place = f"{type(callback).__name__}.{event.__name__}"
                text = f"{place} raised {type(error).__name__}: {error}"
                self._failure = text, error
                return

    def _agree(self) -> None:
        """Raise on all ranks what one has met, and end the run where one asks for it."""
        text, cause = self._failure or ("", None)
        answers = gather_json([text, self.wants_stop], group=self._world.group)
        self._failure = None
        for rank, (failure, _) in enumerate(answers):
            if failure:
                own = cause if rank == self._world.rank else None
                raise CallbackError(f"rank {rank}: {failure}") from own
        if any(stops for _, stops in answers):
            self._timeline.stop()

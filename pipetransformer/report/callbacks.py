"""Define callbacks, call them at each event, and raise one rank's error on all.

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
    """Override the events of interest.

    Every rank calls the same events in the same order, so a callback may use collective methods
    (`evaluate`, `state_dict`, `save_pretrained`) on all ranks alike. Put the work of one process
    behind `if trainer.is_main_process`. `trainer.stop()` ends the run after the step. An exception
    ends the run on all ranks with a `CallbackError`.

        fit     on_train_begin  [ decision  step  evaluation  checkpoint ]...  on_train_end
                                  on_freeze | on_step_end | on_evaluate | on_save
                                  on_transition

    The trainer is a `Trainer`, in its state after the event.
    """

    def on_train_begin(self, trainer: Any) -> None:
        """Run when `fit` begins; a resumed run is at its checkpoint's step."""

    def on_freeze(self, trainer: Any, decision: Decision) -> None:
        """Run when another number of layers is frozen from now on."""

    def on_transition(self, trainer: Any, change: Change) -> None:
        """Run when layers were frozen or moved; the start's pipeline is a transition, too."""

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        """Run after a step; `trainer.global_step` counts it already."""

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation that was due, or a call of `evaluate`."""

    def on_save(self, trainer: Any, folder: Path) -> None:
        """Run when a checkpoint is complete: some steps later, as it is written meanwhile."""

    def on_log(self, trainer: Any, record: Mapping[str, Any]) -> None:
        """Run on rank 0 alone for each record of records.jsonl; use nothing collective.

        An exception ends the run at the next event.
        """

    def on_train_end(self, trainer: Any, report: FitReport) -> None:
        """Run when `fit` ends; rank 0's model has the trained weights."""


def check_callbacks(callbacks: Any) -> None:
    """Raise a TypeError for an element that is no Callback; the config checks the list itself."""
    for index, callback in enumerate(callbacks if isinstance(callbacks, (list, tuple)) else ()):
        if not isinstance(callback, Callback):
            raise TypeError(f"callbacks[{index}] is {callback!r}; give instances of Callback")


@final
class Events:
    """Call a trainer's callbacks in their order; without any, nothing is sent.

    Built by all ranks together.

    Raises:
        ValueError: on every rank: the ranks' callbacks differ.
    """

    def __init__(
        self, trainer: Any, callbacks: Sequence[Callback], *, world: World, timeline: Timeline
    ) -> None:
        # Weak, as the trainer holds this: a cycle would keep its memory until a collection.
        self._trainer, self._callbacks = weakref.ref(trainer), tuple(callbacks)
        self._world, self._timeline = world, timeline
        self._saves = trainer.config.saves
        self._failure: tuple[str, Exception] | None = None
        self.wants_stop = False  # Of this rank alone.
        # An event is collective: a rank without callbacks would leave the others waiting.
        names = gather_json([type(callback).__name__ for callback in callbacks], group=world.group)
        if any(own != names[0] for own in names):
            raise ValueError(
                f"callbacks are {names}, rank by rank; give all ranks the same, and let one do "
                "its work where trainer.is_main_process"
            )

    def ask_to_stop(self) -> None:
        """End the run on all ranks after the next event."""
        self.wants_stop = True

    def tell(self, event: Callable[..., None], *facts: Any) -> None:
        """Call a method of `Callback` on all callbacks. Collective, if there are any.

        Raises:
            CallbackError: on every rank; the message names the rank and the callback that failed.
        """
        if self._callbacks:
            self._call(event, *facts)
            self._agree()

    def tell_of_change(self, change: Change | None) -> None:
        """Call the events of a change between two steps. Collective."""
        if change is None:
            return
        num_before = change.before.num_frozen if change.before else 0
        if change.decision.num_frozen != num_before:
            self.tell(Callback.on_freeze, change.decision)
        if change.is_transition:
            self.tell(Callback.on_transition, change)

    def tell_of_save(self, saved: Saved | None) -> None:
        """Call `on_save` if rank 0 has completed a checkpoint. Collective."""
        if self._callbacks and self._saves:
            folder = str(saved.folder) if saved is not None and saved.num_bytes else None
            folder = broadcast_json(folder, group=self._world.group)
            if folder is not None:
                self.tell(Callback.on_save, Path(folder))

    def log(self, record: Mapping[str, Any]) -> None:
        """Call `on_log` on rank 0; an error is raised at the next event, with all ranks."""
        self._call(Callback.on_log, record)

    def _call(self, event: Callable[..., None], *facts: Any) -> None:
        if self._failure is not None:  # One of `on_log` waits to be raised.
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
        """Raise one rank's error on all, and end the run if one asks for that. Collective."""
        text, cause = self._failure or ("", None)
        answers = gather_json([text, self.wants_stop], group=self._world.group)
        self._failure = None
        for rank, (failure, _) in enumerate(answers):
            if failure:
                local_cause = cause if rank == self._world.rank else None
                raise CallbackError(f"rank {rank}: {failure}") from local_cause
        if any(stops for _, stops in answers):
            self._timeline.stop()

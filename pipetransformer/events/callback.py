"""Say which events a callback hears of, and when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetransformer.report import FitReport
from pipetransformer.stage import StepResult
from pipetransformer.transition import Change, Decision


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

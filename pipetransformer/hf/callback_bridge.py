"""Let transformers' callbacks hear of our events, and keep the state that they read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
)

from pipetransformer.events import Callback
from pipetransformer.stage import StepResult

_UNHEARD = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_prediction_step",
)
"""Events before a step or within it, of which nobody is told here."""

_UNANSWERED = ("should_log", "should_evaluate", "should_save", "should_epoch_stop")


class CallbackBridge(Callback):
    """Keep transformers' state of a run, and call its callbacks.

    Args:
        callbacks: instances or classes.
    Attributes:
        prefix: of the metrics of the evaluation that goes on.
        results: of this process's steps so far; a loss is read where it is logged, as a GPU may
            still compute it.
    Raises:
        ValueError: a callback overrides an event that it would not hear of.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: list[Any],
        *,
        model: Any,
        processing_class: Any,
    ) -> None:
        # Known before the run begins, for callbacks that write on one rank only.
        self.state = TrainerState(
            is_world_process_zero=os.environ.get("RANK", "0") == "0",
            is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",
        )
        self.control = TrainerControl()
        self.prefix = "eval"
        self.num_samples = 1
        self.results: list[StepResult] = []
        self._args, self._num_logged = args, 0
        self._handler = CallbackHandler(
            [DefaultFlowCallback()], model, processing_class, None, None
        )
        # Without one transformers warns, but our Trainer has its own flow.
        self._handler.remove_callback(DefaultFlowCallback)
        for callback in (*callbacks, LogLines):
            self.add(callback)
        self._handler.on_init_end(args, self.state, self.control)

    def add(self, callback: Any) -> None:
        one = callback() if isinstance(callback, type) else callback
        if not isinstance(one, TrainerCallback):
            raise ValueError(
                f"{one!r} is no transformers.TrainerCallback; give one, or train with "
                "pipetransformer.Trainer, which has callbacks of its own"
            )
        kind = type(one)
        unheard = [n for n in _UNHEARD if getattr(kind, n) is not getattr(TrainerCallback, n)]
        if unheard:
            raise ValueError(
                f"{kind.__name__} overrides {', '.join(unheard)}, of which nobody hears here; "
                "leave the callback out"
            )
        self._handler.add_callback(one)

    def refuse_stateful(self) -> None:
        """Raise a ValueError for callbacks that a resumed run would not find as they were."""
        callbacks = self._handler.callbacks
        kept = [type(one).__name__ for one in callbacks if isinstance(one, ExportableState)]
        if kept:
            raise ValueError(
                f"{', '.join(kept)} keeps a state that our checkpoints do not hold; leave it out "
                "of a run that is resumed: early_stopping_patience=... stops alike, and resumes"
            )

    def remove(self, callback: Any) -> None:
        writes_lines = PrinterCallback if self._args.disable_tqdm else ProgressCallback
        self._handler.remove_callback(LogLines if callback is writes_lines else callback)

    def on_train_begin(self, trainer: Any) -> None:
        state, steps = self.state, trainer.max_steps
        per_epoch = -(-self.num_samples // trainer.config.global_batch_size)
        state.max_steps, state.num_train_epochs = steps, -(-steps // per_epoch)
        state.train_batch_size = self._args.per_device_train_batch_size
        state.compute_steps(self._args, state.max_steps)
        self._note(trainer)
        self._note_best(trainer)
        self._take_up(trainer)
        self.tell(trainer, "on_train_begin")
        self.tell(trainer, "on_epoch_begin")

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self._note(trainer)
        self.results.append(result)
        self.tell(trainer, "on_step_end")
        ends_epoch = trainer.epoch.is_integer() or trainer.is_over
        if self._logs_now(ends_epoch=ends_epoch):
            new = [one.loss for one in self.results[self._num_logged :]]
            self._num_logged = len(self.results)
            logs = {"loss": sum(new) / len(new), "grad_norm": result.gradient_norm}
            self.log(trainer, {**logs, "learning_rate": trainer.learning_rate})
        if ends_epoch:
            self.tell(trainer, "on_epoch_end")
            if not trainer.is_over:
                self.tell(trainer, "on_epoch_begin")

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        self._note(trainer)
        named = prefixed(metrics, self.prefix)
        self.log(trainer, named)
        self.tell(trainer, "on_evaluate", metrics=named)
        self._note_best(trainer)  # After it, as an early stop compares with the best so far.

    def on_save(self, trainer: Any, folder: Path) -> None:
        if trainer.is_main_process:
            self.state.save_to_json(str(self._state_file))
        self.tell(trainer, "on_save")

    @contextmanager
    def asked_for(self, prefix: str) -> Iterator[None]:
        """Give the metrics that a script asks for a prefix."""
        self.prefix = prefix
        try:
            yield
        finally:
            self.prefix = "eval"

    def log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        """Take down numbers of this step, and tell of them."""
        state = self.state
        entry = {**logs, "epoch": state.epoch}
        state.log_history.append({**entry, "step": state.global_step})
        self.tell(trainer, "on_log", logs=entry)

    @property
    def _state_file(self) -> Path:
        return Path(str(self._args.output_dir), "trainer_state.json")

    def _take_up(self, trainer: Any) -> None:
        """Continue what was logged before the step at which a resumed run goes on."""
        step = trainer.global_step
        if not step or not self._state_file.exists():
            return
        history = TrainerState.load_from_json(str(self._state_file)).log_history
        for entry in history:
            if entry["step"] <= step and entry not in self.state.log_history:
                self.state.log_history.append(entry)

    def _note(self, trainer: Any) -> None:
        self.state.global_step = trainer.global_step
        self.state.epoch = trainer.epoch

    def _note_best(self, trainer: Any) -> None:
        """Keep the best of the run's own evaluations, where the arguments name a metric."""
        if self._args.metric_for_best_model is not None:
            best = trainer.report
            self.state.best_metric, self.state.best_global_step = best.best_metric, best.best_step

    def _logs_now(self, *, ends_epoch: bool) -> bool:
        flow, control = DefaultFlowCallback(), TrainerControl()
        flow.on_step_end(self._args, self.state, control)
        if ends_epoch:
            flow.on_epoch_end(self._args, self.state, control)
        return bool(control.should_log)

    def tell(self, trainer: Any, event: str, **facts: Any) -> None:
        """Call transformers' event of all callbacks, and do what they ask for."""
        before = replace(self.control)
        self.control = self._handler.call_event(
            event, self._args, self.state, self.control, **facts
        )
        asked = [name for name in _UNANSWERED if getattr(self.control, name)]
        if asked:
            self.control = before
            raise ValueError(
                f"a callback has set control.{asked[0]} in {event}, which is not honoured here; "
                "let logging_steps, eval_strategy and save_strategy say when"
            )
        if self.control.should_training_stop and not trainer.is_over:
            trainer.stop()


class LogLines(TrainerCallback):
    """Write the lines of transformers' ProgressCallback, or of its PrinterCallback without a bar.

    The former does so while training only.
    """

    _trains = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._trains = True

    def on_train_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._trains = False

    def on_log(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        if state.is_world_process_zero and (self._trains or args.disable_tqdm):
            line = {
                name: f"{value:.4g}" if isinstance(value, float) else value
                for name, value in facts["logs"].items()
                if name != "total_flos"
            }
            tqdm.write(str(line))  # A bar that is there goes on below it.


def prefixed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics under names that begin with a prefix, as some may already."""
    begin = f"{prefix}_"
    return {n if n.startswith(begin) else begin + n: value for n, value in metrics.items()}

"""Call transformers' callbacks at our events, and keep the state that they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
)

from pipetransformer.hf.log_history import LogHistory
from pipetransformer.hf.pretrained_checkpoints import clear_pretrained, write_pretrained
from pipetransformer.processes import told_by_rank_0
from pipetransformer.report import Callback
from pipetransformer.stage import StepResult

_UNHEARD = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_prediction_step",
)
"""Events before a step or within it, which are not told here."""

_UNANSWERED = ("should_log", "should_evaluate", "should_save", "should_epoch_stop")


class CallbackBridge(Callback):
    """Keep transformers' state of a run, and call its callbacks.

    Args:
        callbacks: instances or classes.
        writes_pretrained: also write checkpoints for `from_pretrained`.
    Attributes:
        is_silent: whether callbacks are not told of an evaluation, as the script tells them.
        evaluate: called at due evaluations; None if our Trainer evaluates by itself.
        handler: calls transformers' callbacks.
        num_samples: of an epoch.
        samples_before: trained before this process resumed the run.
        losses: of this process's steps so far.
    Raises:
        ValueError: a callback overrides an event that is not told.
    """

    def __init__(
        self,
        args: TrainingArguments,
        callbacks: list[Any],
        *,
        model: Any,
        processing_class: Any,
        writes_pretrained: bool,
    ) -> None:
        # Callbacks that write on one rank only read it before the run begins.
        self.state = TrainerState(
            is_world_process_zero=os.environ.get("RANK", "0") == "0",
            is_local_process_zero=os.environ.get("LOCAL_RANK", "0") == "0",
        )
        self.control = TrainerControl()
        self.is_silent = False
        self.evaluate: Callable[[], object] | None = None
        self.num_samples = 1
        self.samples_before = 0
        self.losses = StepLosses()
        self._args, self._writes_pretrained = args, writes_pretrained
        self._output_dir = Path(str(args.output_dir))
        self._history = LogHistory(self._output_dir)
        self.handler = CallbackHandler(
            [DefaultFlowCallback()], model, processing_class, None, None
        )
        # The handler warns if it is made without a flow, but our Trainer has its own.
        self.handler.remove_callback(DefaultFlowCallback)
        for callback in (*callbacks, LogLines):
            self.add(callback)
        self.handler.on_init_end(args, self.state, self.control)

    def add(self, callback: Any) -> None:
        instance = callback() if isinstance(callback, type) else callback
        if not isinstance(instance, TrainerCallback):
            raise ValueError(
                f"{instance!r} is no transformers.TrainerCallback; give one, or train with "
                "pipetransformer.Trainer, which has callbacks of its own"
            )
        kind = type(instance)
        unheard = [n for n in _UNHEARD if getattr(kind, n) is not getattr(TrainerCallback, n)]
        if unheard:
            raise ValueError(
                f"{kind.__name__} overrides {', '.join(unheard)}, of which nobody hears here; "
                "leave the callback out"
            )
        self.handler.add_callback(instance)

    def refuse_stateful(self) -> None:
        """Raise a ValueError for callbacks whose state a resumed run would lack."""
        callbacks = self.handler.callbacks
        stateful = [type(one).__name__ for one in callbacks if isinstance(one, ExportableState)]
        if stateful:
            raise ValueError(
                f"{', '.join(stateful)} keeps a state that our checkpoints do not hold; leave it "
                "out of a run that is resumed: early_stopping_patience=... stops alike, and "
                "resumes"
            )

    def remove(self, callback: Any) -> None:
        writes_lines = PrinterCallback if self._args.disable_tqdm else ProgressCallback
        self.handler.remove_callback(LogLines if callback is writes_lines else callback)

    def on_train_begin(self, trainer: Any) -> None:
        state, steps = self.state, trainer.max_steps
        state.log_history.clear()  # Transformers also forgets evaluations before training.
        self.samples_before = trainer.report.samples
        per_epoch = -(-self.num_samples // trainer.config.global_batch_size)
        state.max_steps, state.num_train_epochs = steps, -(-steps // per_epoch)
        state.train_batch_size = self._args.per_device_train_batch_size
        state.compute_steps(self._args, state.max_steps)
        self.note(trainer)
        self._note_best(trainer)
        self._restore_log(trainer)
        self.tell(trainer, "on_train_begin")
        self.tell(trainer, "on_epoch_begin")

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        self.note(trainer)
        self.losses.add(result)
        self.tell(trainer, "on_step_end")
        ends_epoch = trainer.epoch.is_integer() or trainer.is_over
        flow = self._flow(ends_epoch)
        if flow.should_log:
            logs = {"loss": self.losses.take(), "grad_norm": result.gradient_norm}
            self.log(trainer, {**logs, "learning_rate": trainer.learning_rate})
        if ends_epoch:
            self.tell(trainer, "on_epoch_end")
            if not trainer.is_over:
                self.tell(trainer, "on_epoch_begin")
        if self.evaluate is not None and flow.should_evaluate:
            self.evaluate()

    def on_evaluate(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        if self.is_silent:
            return
        self.note(trainer)
        named = prefixed(metrics, "eval")
        self.log(trainer, named)
        self.tell(trainer, "on_evaluate", metrics=named)
        self._note_best(trainer)  # Only now: an early stop compares with the best before.

    def on_save(self, trainer: Any, folder: Path) -> None:
        if trainer.is_main_process:
            self._history.write_state(self.state)
            if self._writes_pretrained:
                model, processing_class = self.handler.model, self.handler.processing_class
                keep = trainer.config.keep_checkpoints
                write_pretrained(folder, self._output_dir, model, processing_class, keep=keep)
        self.tell(trainer, "on_save")

    def finish(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Log what the run took, and tell of its end; another run may then replace it."""
        if trainer.is_main_process and trainer.config.saves:
            # Before the totals: a run that goes on must not have them in its log.
            self._history.write_state(self.state)
        self._history.close()
        self.log(trainer, metrics)
        self.tell(trainer, "on_train_end")

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Keep callbacks from hearing of our Trainer's evaluations."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False

    def log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        """Add numbers to the log at this step, and tell callbacks."""
        state = self.state
        entry = {**logs, "epoch": state.epoch}
        state.log_history.append({**entry, "step": state.global_step})
        self._history.add(state.log_history[-1])
        self.tell(trainer, "on_log", logs=entry)

    def _restore_log(self, trainer: Any) -> None:
        """Restore the log up to the step at which a resumed run goes on."""
        step, is_main = trainer.global_step, trainer.is_main_process
        if step:
            read = partial(self._history.read, step)
            self.state.log_history += told_by_rank_0(read, group=trainer.world.group)
        elif is_main:  # They are of a run that this one replaces.
            clear_pretrained(self._output_dir)
        if is_main and trainer.config.saves:
            self._history.begin(self.state.log_history)

    def note(self, trainer: Any) -> None:
        """Copy the run's position."""
        self.state.global_step = trainer.global_step
        self.state.epoch = trainer.epoch

    def _note_best(self, trainer: Any) -> None:
        """Copy the best evaluation, if the arguments name a metric."""
        if self._args.metric_for_best_model is not None:
            best = trainer.report
            self.state.best_metric, self.state.best_global_step = best.best_metric, best.best_step

    def _flow(self, ends_epoch: bool) -> TrainerControl:
        """Return what transformers' own flow would ask for after this step."""
        flow, control = DefaultFlowCallback(), TrainerControl()
        flow.on_step_end(self._args, self.state, control)
        if ends_epoch:
            flow.on_epoch_end(self._args, self.state, control)
        return control

    def tell(self, trainer: Any, event: str, **facts: Any) -> None:
        """Call all callbacks' event, and do what they ask for."""
        before = replace(self.control)  # Callbacks change it in place, also in refused ways.
        asked = self.handler.call_event(event, self._args, self.state, self.control, **facts)
        self.control = before
        self.follow(asked, trainer, f"a callback has set {{}} in {event}")

    def follow(self, control: TrainerControl, trainer: Any, told: str) -> None:
        """Do what a control asks for.

        Raises:
            ValueError: it is not honoured; `told` says who asks for {}.
        """
        if asked := [name for name in _UNANSWERED if getattr(control, name)]:
            raise ValueError(
                f"{told.format(f'control.{asked[0]}')}, which is not honoured here; let "
                "logging_steps, eval_strategy and save_strategy say when"
            )
        self.control = control
        if control.should_training_stop and not trainer.is_over:
            trainer.stop()


@final
class StepLosses:
    """Add up the losses of steps; a GPU may still be computing the newest."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._total = self._new = 0.0
        self._num_new = 0
        self._newest: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Count a step; read the loss of the step before, which is ready without a wait."""
        self._read()
        self.num_steps, self._num_new, self._newest = self.num_steps + 1, self._num_new + 1, result

    def take(self) -> float:
        """Return the mean over the steps since the last call, at least one."""
        self._read()
        mean = self._new / self._num_new
        self._new, self._num_new = 0.0, 0
        return mean

    def mean(self) -> float:
        """Return the mean over all steps; 0 without any."""
        self._read()
        return self._total / max(1, self.num_steps)

    def _read(self) -> None:
        if self._newest is not None:
            loss, self._newest = self._newest.loss, None
            self._total, self._new = self._total + loss, self._new + loss


class LogLines(TrainerCallback):
    """Print logs as transformers' ProgressCallback, or without a bar as its PrinterCallback.

    The former prints only while training.
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
            tqdm.write(str(line))  # Not print: it would tear a bar.


def prefixed(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics with a prefix before names that lack it."""
    begin = f"{prefix}_"
    return {n if n.startswith(begin) else begin + n: value for n, value in metrics.items()}

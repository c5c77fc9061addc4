"""Advise, or freeze in place, within `transformers.Trainer`."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from freeze.advisor.observer import Observer, learning_rates

# Not a class's name: for those transformers may build the callback anew, without its arguments.
_STATE = "freeze_advisor"
_LOGGER = logging.getLogger(__name__)


class FreezeAdvisor(Observer, TrainerCallback):
    """Say which bottom layers of a run are quiet, and what freezing them would save.

    At the end the advice is logged, and written to the output folder as freeze_advice.json and
    .png. Without `act` the run is what it is without the callback. With `act` layers freeze where
    they are; a resumed run freezes them again, as the advisor's state is in each checkpoint's
    trainer_state.json.

    Args:
        policy, every_steps, act, layers: see `Observer`.
    Raises:
        ValueError: at the start: layers are to freeze in several processes, where the model is
            wrapped by then.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch; a resumed run goes on from its checkpoint's state."""
        self.refuse_wrapped(args.world_size)
        self.forget()
        if state.global_step:
            self._resume(state)
        self.begin(
            kwargs["model"],
            max_steps=state.max_steps,
            steps_per_epoch=_steps_per_epoch(args, state, kwargs["train_dataloader"]),
            # Only accelerate's wrapper of an optimizer has one.
            scaler=getattr(kwargs["optimizer"], "scaler", None),
        )
        if self.acts and args.gradient_checkpointing and not _is_reentrant(args):
            # An embedding's output that wants a gradient keeps frozen layers' backward running.
            kwargs["model"].disable_input_require_grads()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of the update, which the scaler of gradients may have skipped."""
        # DeepSpeed has its own scaler.
        self.end_update(skipped=getattr(kwargs["optimizer"], "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the layers, where that is due."""
        rate, peak = learning_rates(kwargs["optimizer"].param_groups)
        look = self.end_step(state.global_step, learning_rate=rate, peak_learning_rate=peak)
        # A checkpoint of this step is written after this, with all that this dict holds.
        state.stateful_callbacks[_STATE] = self.state_dict()
        if look is not None and state.is_world_process_zero:
            _LOGGER.info("step %d: %s", state.global_step, self.advice)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Note the metrics, for policies that look at them."""
        self.end_evaluation(state.global_step, metrics or {})
        state.stateful_callbacks[_STATE] = self.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log and write the advice."""
        if state.is_world_process_zero:
            self.publish(args.output_dir)

    def _resume(self, state: Any) -> None:
        if (saved := state.stateful_callbacks.get(_STATE)) is not None:
            self.load_state_dict(saved)
        elif state.is_world_process_zero:
            _LOGGER.warning(
                "the checkpoint's trainer_state.json has no %r, as it was saved without "
                "FreezeAdvisor; it begins anew at step %d, with no layer frozen",
                _STATE,
                state.global_step,
            )


def _steps_per_epoch(args: Any, state: Any, loader: Any) -> int:
    """Return the steps of an epoch; of data without a length all steps are one."""
    if not has_length(loader):
        return int(state.max_steps)
    return math.ceil(len(loader) / args.gradient_accumulation_steps)


def _is_reentrant(args: Any) -> bool:
    """Tell whether checkpointed layers learn only where their input wants a gradient."""
    return bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False))

"""Advise, or freeze in place, within `transformers.Trainer`."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from freeze.advisor.observer import Observer, learning_rates
from freeze.advisor.thaw_check import ThawCheck

# Not a class's name: for a class transformers may build the callback anew, without arguments.
_STATE = "freeze_advisor"
_LOGGER = logging.getLogger(__name__)


class FreezeAdvisor(Observer, TrainerCallback):
    """Say which bottom layers of a run are quiet, and what freezing them would save.

    At the end the advice is logged, and written to the output folder as freeze_advice.json and
    .png. Without `act` the callback changes nothing. With `act` layers freeze in place. A resumed
    run freezes them again, as each checkpoint's trainer_state.json holds the advisor's state.

    Args:
        policy, every_steps, act, layers: see `Observer`.
    Raises:
        ValueError: at the start: it is to freeze in several processes. Whenever blocks thaw that
            were frozen before: the optimizer does not have their weights.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
            thaw_check=ThawCheck(
                kwargs["model"], [kwargs["optimizer"]], is_replicated=args.world_size > 1
            ),
        )
        if self.acts and args.gradient_checkpointing and not _is_reentrant(args):
            # Else the embedding's output wants a gradient, and frozen layers run their backward.
            kwargs["model"].disable_input_require_grads()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed has its own scaler.
        self.end_update(skipped=getattr(kwargs["optimizer"], "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rate, peak = learning_rates(kwargs["optimizer"].param_groups)
        look = self.end_step(state.global_step, learning_rate=rate, peak_learning_rate=peak)
        # A checkpoint of this step is written later, and holds this dict.
        state.stateful_callbacks[_STATE] = self.state_dict()
        if look is not None and state.is_world_process_zero:
            _LOGGER.info("step %d: %s", state.global_step, self.advice)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.end_evaluation(state.global_step, metrics or {})
        state.stateful_callbacks[_STATE] = self.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
    """Return the steps of an epoch; data without a length counts as one epoch."""
    if not has_length(loader):
        return int(state.max_steps)
    return math.ceil(len(loader) / args.gradient_accumulation_steps)


def _is_reentrant(args: Any) -> bool:
    # Then checkpointed layers learn only if their input wants a gradient.
    return bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False))

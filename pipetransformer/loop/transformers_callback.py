"""Freeze and cache within `transformers.Trainer`, and others made of it, as TRL's SFTTrainer."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import has_length

from pipetransformer.loop.serving_observer import ServingObserver

# Not a class's name: for a class transformers may build the callback anew, without arguments.
# Checkpoints of version 0.2 have this one.
_STATE = "freeze_advisor"
_LOGGER = logging.getLogger(__name__)


@final
class FreezeCallback(ServingObserver, TrainerCallback):
    """Freeze a model's bottom blocks as a policy says, and have it start above them.

        trainer = Trainer(..., callbacks=[FreezeCallback(freeze=[0, 2, 4])])

    Numbers are those of the same training with `cache=False`. Each checkpoint holds what is
    frozen, and the policy's state: a resumed training goes on with them. Rows are made anew.

    Args:
        freeze, parts, every_steps, cache, dry_run, layers, settings: see `ServingObserver`. The
            precision is the trainer's.
    Raises:
        ValueError: at the start: the training is one whose blocks cannot freeze, or whose model or
            samples cannot be cached. Whenever blocks thaw that were frozen before: the optimizer
            does not have their weights.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        if not self.dry_run:
            _refuse_what_cannot_freeze(args, model)
        _refuse_reference_that_follows(args, model, self._parts)
        if self.makes_rows:
            precision = "bf16" if args.bf16 else "fp16" if args.fp16 else None
            self.begin_rows(model, loader, precision=precision)
            if (trainer := _trainer_of(self)) is not None:
                # Evaluations and predictions of all its subclasses come by it.
                self.serve_evaluations(trainer, "evaluation_loop", partial(self._around, args))
        try:
            self.forget()
            if state.global_step:
                self._resume(state)
            self.begin(
                model,
                [kwargs["optimizer"]],
                max_steps=state.max_steps,
                steps_per_epoch=_steps_per_epoch(args, state, loader),
                # Only accelerate's wrapper of an optimizer has one.
                scaler=getattr(kwargs["optimizer"], "scaler", None),
            )
            if not self.advice.looks:
                self.look(state.global_step)
        except Exception:
            self.end_rows()  # No trainer ends what it could not begin.
            raise
        if not self.dry_run and args.gradient_checkpointing and not _is_reentrant(args):
            # Else the embedding's output wants a gradient, and frozen layers run their backward.
            model.disable_input_require_grads()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.take_over(kwargs["train_dataloader"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.let_go()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed has its own scaler.
        self.end_update(skipped=getattr(kwargs["optimizer"], "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_step(state.global_step)
        # A checkpoint of this step is written later, and holds this dict.
        state.stateful_callbacks[_STATE] = self.state_dict()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        self.end_evaluation(state.global_step, metrics or {})
        state.stateful_callbacks[_STATE] = self.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_rows()
        self.publish()

    def _around(
        self,
        args: Any,
        dataloader: Any,
        description: str = "",
        prediction_loss_only: bool | None = None,
        *_: Any,
        **__: Any,
    ) -> AbstractContextManager[None]:
        """Return what `Trainer.evaluation_loop`, given this, is to run in."""
        only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return self.evaluating(dataloader, keeps_to_labels=bool(only))

    def _resume(self, state: Any) -> None:
        if (saved := state.stateful_callbacks.get(_STATE)) is not None:
            self.load_state_dict(saved)
        elif state.is_world_process_zero:
            _LOGGER.warning(
                "the checkpoint's trainer_state.json has no %r, as it was saved without "
                "FreezeCallback; its policy begins anew at step %d, with no layer frozen",
                _STATE,
                state.global_step,
            )


def _trainer_of(callback: TrainerCallback) -> Trainer | None:
    """Return the trainer that calls a callback, on whose evaluations no callback is called before.

    transformers tells a callback everything but that, so the calls under way are looked through.
    """
    frame = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, Trainer) and callback in own.callback_handler.callbacks:
            return own
        frame = frame.f_back
    return None


def _steps_per_epoch(args: Any, state: Any, loader: Any) -> int:
    """Return the steps of an epoch; data without a length counts as one epoch."""
    if not has_length(loader):
        return int(state.max_steps)
    return math.ceil(len(loader) / args.gradient_accumulation_steps)


def _is_reentrant(args: Any) -> bool:
    # Then checkpointed layers learn only if their input wants a gradient.
    return bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False))


def _refuse_reference_that_follows(
    args: Any, model: nn.Module, parts: Sequence[str | nn.Module]
) -> None:
    inner = {*model.modules()}
    is_beside = any(isinstance(part, nn.Module) and part not in inner for part in parts)
    if is_beside and getattr(args, "sync_ref_model", False):
        raise ValueError(
            "sync_ref_model=True has the reference follow the model within an epoch, and rows are "
            "of a reference that stays: set sync_ref_model=False, or leave it out of parts="
        )


def _refuse_what_cannot_freeze(args: Any, model: nn.Module) -> None:
    # By its name: importing that class takes half as long as importing torch.
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    is_fsdp2 = bool(args.fsdp) and "FSDPModule" in kinds
    if args.world_size > 1 and not is_fsdp2:
        finds_unused = args.ddp_find_unused_parameters
        if finds_unused is None:  # As transformers chooses.
            finds_unused = not args.gradient_checkpointing
        if not finds_unused or args.ddp_static_graph:
            raise ValueError(
                "DistributedDataParallel waits for the gradients of all weights that it has "
                "found, also of those that freeze later: set ddp_find_unused_parameters=True, "
                "and no ddp_static_graph"
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"DataParallel copies the model to {args.n_gpu} GPUs in each step, without its rows; "
            "start one process for each GPU with torchrun, or show one GPU"
        )
    if args.deepspeed or (args.fsdp and not is_fsdp2):
        raise ValueError(
            "FSDP1 and DeepSpeed hold parts of each weight, so that blocks cannot freeze, or run "
            "by themselves; use FSDP2, fsdp_config={'version': 2}, or DistributedDataParallel"
        )

"""Freeze and cache within `transformers.Trainer`, and others made of it, as TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any, final

from freeze.advisor import FreezeAdvisor, learning_rates
from pipetransformer.loop.serving_observer import ServingObserver


@final
class FreezeCallback(ServingObserver, FreezeAdvisor):
    """Freeze a model's bottom blocks as a policy says, and have it start above them.

        trainer = Trainer(..., callbacks=[FreezeCallback(freeze=[0, 2, 4])])

    Numbers are those of the same training with `cache=False`. Each checkpoint holds what is
    frozen, and the policy's state: a resumed training goes on with them. Rows are made anew.

    Args:
        freeze, every_steps, cache, layers, settings: see `ServingObserver`. The precision is the
            trainer's.
    Raises:
        ValueError: at the start: the training is one whose blocks cannot freeze, or whose model or
            samples cannot be cached. Whenever blocks thaw that were frozen before: the optimizer
            does not have their weights.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _refuse_what_cannot_freeze(args)
        self.begin_rows(
            kwargs["model"],
            kwargs["train_dataloader"],
            precision="bf16" if args.bf16 else "fp16" if args.fp16 else None,
        )
        try:
            super().on_train_begin(args, state, control, **kwargs)
            if not self.advice.looks:
                rate, _ = learning_rates(kwargs["optimizer"].param_groups)
                self.look(state.global_step, learning_rate=rate)
        except Exception:
            self.end_rows()  # No trainer ends what it could not begin.
            raise

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.take_over(kwargs["train_dataloader"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.let_go()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end_rows()
        super().on_train_end(args, state, control, **kwargs)


def _refuse_what_cannot_freeze(args: Any) -> None:
    if args.world_size > 1:
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
    if args.fsdp or args.deepspeed:
        raise ValueError(
            "FSDP and DeepSpeed hold parts of each weight, so that blocks cannot freeze, or run "
            "by themselves; use DistributedDataParallel"
        )

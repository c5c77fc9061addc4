"""Freeze and cache within Lightning's Trainer."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, final

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from freeze import FreezeChoice
from pipetransformer.loop.batches import base_of
from pipetransformer.loop.serving_observer import ServingObserver

_PRECISIONS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""Lightning's names of autocast, and ours."""


@final
class LightningFreezeCallback(ServingObserver, Callback):
    """Freeze a model's bottom blocks as a policy says, and have it start above them.

        trainer = Trainer(..., callbacks=[LightningFreezeCallback(freeze=[0, 2, 4])])

    Numbers are those of the same training with `cache=False`. A checkpoint holds what is frozen,
    and the policy's state: a resumed training goes on with them. Rows are made anew.

    Args:
        freeze, settings: see `ServingObserver`, also for its `parts`, `every_steps`, `cache`,
            `dry_run` and `layers`. The precision is the trainer's. Names of parts are those in
            `model`.
        model: the name of the part of the LightningModule that its steps give batches to; None
            takes the only one with weights. Of several, a single one that `parts` names has rows
            by itself, as a backbone beside a head.
    Raises:
        ValueError: at the start: the training's length is not known, its blocks cannot freeze, or
            its model or samples cannot be cached. Whenever blocks thaw that were frozen before: no
            optimizer has their weights.
    """

    _num_seen = 0

    def __init__(
        self, freeze: FreezeChoice | None = None, *, model: str | None = None, **settings: Any
    ) -> None:
        super().__init__(freeze, **settings)
        self._name = model

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = torch.get_rng_state()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.dry_run:
            _refuse_what_cannot_freeze(trainer)
        max_steps, steps_per_epoch = _lengths(trainer)
        if self.makes_rows:
            part, precision = self._lone_part(pl_module), _PRECISIONS.get(trainer.precision)
            model = _part(pl_module, self._name) if part is None else part
            parts = None if part is None else (part,)
            self.begin_rows(model, trainer.train_dataloader, precision=precision, parts=parts)
            # No hook is called before it has begun its loaders' iterators.
            validation = trainer.fit_loop.epoch_loop.val_loop
            self.serve_evaluations(
                validation, "run", lambda: self.evaluating(*_validated(trainer, validation))
            )
        self._num_seen = trainer.global_step
        if not self._num_seen:
            self.forget()
        self.begin(
            pl_module,
            trainer.optimizers,
            max_steps=max_steps,
            steps_per_epoch=steps_per_epoch,
            # Only plugins of mixed precision have one.
            scaler=getattr(trainer.precision_plugin, "scaler", None),
        )
        if not self.advice.looks:
            self.look(trainer.global_step)
        if self.makes_rows:
            self._begin_first_epoch(trainer, trainer.train_dataloader)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.take_over(trainer.train_dataloader)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.let_go()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._num_seen:
            return  # Gradients are still being accumulated.
        self._num_seen = trainer.global_step
        self.end_update()
        self.end_step(self._num_seen)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.turn_to(dataloader_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.end_evaluation(trainer.global_step, metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end_rows()
        self.publish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end_rows()

    def _lone_part(self, module: nn.Module) -> nn.Module | None:
        """Return the part of a LightningModule that has rows by itself; None for no such one."""
        if self._name is not None or self.watches or len(self._parts) != 1:
            return None
        if len(_parts_with_weights(module)) < 2:
            return None
        part = dict(module.named_modules()).get(self._parts[0], self._parts[0])
        return part if isinstance(part, nn.Module) else None

    def _begin_first_epoch(self, trainer: Any, loader: Any) -> None:
        """Begin the epoch's iterator anew: Lightning has begun it before it calls any callback.

        The loop's random numbers go on as if it had begun once.
        """
        base = base_of(loader)
        # Without a length Lightning itself reads ahead.
        own, reads_ahead = base.generator, base.num_workers > 0 or sized_len(loader) is None
        if reads_ahead and (own is not None or base.persistent_workers):
            return  # It has drawn batches already, so the first epoch is left as it is.
        self.take_over(loader)
        with ExitStack() as after:
            if reads_ahead:
                torch.set_rng_state(self._before)
            else:
                after.callback(torch.set_rng_state, torch.get_rng_state())
            if own is not None:
                after.callback(own.set_state, own.get_state())
            iter(trainer.fit_loop._data_fetcher)


def _validated(trainer: Any, validation: Any) -> list[Any]:
    """Return the loaders of a validation within the training, in their order."""
    validation.setup_data()  # As it does itself, where they may be new ones.
    return tree_leaves(trainer.val_dataloaders)


def _part(module: nn.Module, name: str | None) -> nn.Module:
    """Return the part of a LightningModule that is given batches."""
    if name is not None:
        return module.get_submodule(name)
    parts = _parts_with_weights(module)
    if len(parts) != 1:
        raise ValueError(
            f"{type(module).__name__} has the parts {sorted(parts)} with weights; name the one "
            "that its steps give batches to: LightningFreezeCallback(..., model='name')"
        )
    return next(iter(parts.values()))


def _parts_with_weights(module: nn.Module) -> dict[str, nn.Module]:
    return {name: one for name, one in module.named_children() if [*one.parameters()]}


def _lengths(trainer: Any) -> tuple[int, int]:
    """Return the steps of the training and of an epoch; data without a length is one epoch."""
    steps = trainer.estimated_stepping_batches
    if not 1 <= steps < math.inf:
        raise ValueError(
            "LightningFreezeCallback must know how many steps the training takes, which "
            f"max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps} with "
            f"{trainer.num_training_batches} batches an epoch do not say; give max_steps, or "
            "max_epochs with a dataset that has a length, or with limit_train_batches"
        )
    per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
    return int(steps), math.ceil(min(steps, per_epoch))


def _refuse_what_cannot_freeze(trainer: Any) -> None:
    if trainer.world_size == 1:
        return
    wrapped = trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel):
        raise ValueError(
            f"{type(trainer.strategy).__name__} may hold parts of each weight, so that blocks "
            "cannot freeze, or run by themselves; use DDPStrategy(find_unused_parameters=True)"
        )
    if not wrapped.find_unused_parameters or wrapped.static_graph:
        raise ValueError(
            "DistributedDataParallel waits for the gradients of all weights that it has found, "
            "also of those that freeze later: give strategy=DDPStrategy("
            "find_unused_parameters=True), and no static_graph"
        )

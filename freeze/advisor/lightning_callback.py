"""Advise, or freeze in place, within Lightning's Trainer."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback

from freeze.advisor.observer import Observer, learning_rates
from freeze.advisor.thaw_check import ThawCheck

_LOGGER = logging.getLogger(__name__)


class LightningFreezeAdvisor(Observer, Callback):
    """Say which bottom layers of a run are quiet, and what freezing them would save.

    It works as `FreezeAdvisor`. Its state is part of Lightning's checkpoint, so a resumed run
    freezes the same layers again. The advice goes to the trainer's default_root_dir.

    Args:
        policy, every_steps, act, layers: see `Observer`.
    Raises:
        ValueError: at the start: it is to freeze in several processes, or the length of the
            training is not known. Whenever layers thaw that were frozen before: no optimizer has
            their weights.
    """

    _seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.refuse_wrapped(trainer.world_size)
        steps = trainer.estimated_stepping_batches
        if not 1 <= steps < math.inf:
            raise ValueError(
                "LightningFreezeAdvisor must know how many steps the training takes, which "
                f"max_epochs={trainer.max_epochs} and max_steps={trainer.max_steps} with "
                f"{trainer.num_training_batches} batches an epoch do not say; give max_steps, or "
                "max_epochs with a dataset that has a length, or with limit_train_batches"
            )
        # Data without a length counts as one epoch.
        per_epoch = math.ceil(
            min(steps, trainer.num_training_batches / trainer.accumulate_grad_batches)
        )
        self._seen = trainer.global_step
        if not self._seen:
            self.forget()
        # Only plugins of mixed precision have one.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.begin(
            pl_module,
            max_steps=int(steps),
            steps_per_epoch=per_epoch,
            scaler=scaler,
            thaw_check=ThawCheck(
                pl_module, trainer.optimizers, is_replicated=trainer.world_size > 1
            ),
        )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen:
            return  # Gradients are still being accumulated.
        self._seen = trainer.global_step
        self.end_update()
        rate, peak = learning_rates(trainer.optimizers[0].param_groups)
        look = self.end_step(self._seen, learning_rate=rate, peak_learning_rate=peak)
        if look is not None and trainer.is_global_zero:
            _LOGGER.info("step %d: %s", self._seen, self.advice)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            found = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.end_evaluation(trainer.global_step, found)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.publish(trainer.default_root_dir)

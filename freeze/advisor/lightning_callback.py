"""Advise, or freeze in place, within Lightning's Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from freeze.advisor.observer import Observer

_LOGGER = logging.getLogger(__name__)


class LightningFreezeAdvisor(Observer, Callback):
    """Say which bottom layers of a run are quiet, and what freezing them would save.

    As `FreezeAdvisor`; its state is part of Lightning's checkpoint, so that a resumed run freezes
    the same layers again, and no others. The advice goes to the trainer's default_root_dir.

    Args:
        policy, every_steps, act, layers: see `Observer`.
    Raises:
        ValueError: at the start: layers are to freeze in several processes.
    """

    _seen = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        if self.acts and trainer.world_size > 1:
            raise ValueError(
                "LightningFreezeAdvisor(act=True) cannot freeze what DistributedDataParallel has "
                "wrapped; watch with act=False, and start anew with layers frozen by freeze.apply"
            )
        steps = max(1, int(trainer.estimated_stepping_batches))
        per_epoch = max(1, steps // max(1, trainer.max_epochs or 1))
        self.begin(pl_module, max_steps=steps, steps_per_epoch=per_epoch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the layers, where a step was taken and a look is due."""
        if trainer.global_step == self._seen:
            return  # Gradients are still being accumulated.
        self._seen = trainer.global_step
        self.end_update()
        groups = trainer.optimizers[0].param_groups
        peak = max(group.get("initial_lr", group["lr"]) for group in groups)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        look = self.end_step(
            self._seen,
            learning_rate=float(groups[0]["lr"]),
            peak_learning_rate=float(peak),
            metrics=metrics,
        )
        if look is not None and trainer.is_global_zero:
            _LOGGER.info("step %d: %s", self._seen, self.advice)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log and write the advice."""
        advice = self.end()
        if trainer.is_global_zero:
            _LOGGER.warning("%s", advice)
            advice.write(Path(trainer.default_root_dir))

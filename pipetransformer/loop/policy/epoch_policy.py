"""Ask a policy before each epoch of a loop, whose optimizer tells of its steps."""

from __future__ import annotations

import sys
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from freeze import FreezePolicy
from pipetransformer.loop.policy.freeze_observer import FreezeObserver
from pipetransformer.loop.rows import RowService


@final
class EpochPolicy(FreezeObserver):
    """Watch an optimizer's steps, and freeze before each epoch what a policy says.

    Args:
        num_epochs: of the whole loop, as policies ask how far it is.
    """

    def __init__(
        self,
        policy: FreezePolicy,
        optimizer: Optimizer,
        num_epochs: int,
        *,
        dry_run: bool,
    ) -> None:
        super().__init__(policy, every_steps=sys.maxsize, dry_run=dry_run)
        self._optimizer, self._num_epochs = optimizer, num_epochs
        self._step, self._owes_end = 0, False
        self._handles: list[RemovableHandle] = []

    def begin_epoch(
        self, epoch: int, model: nn.Module, num_batches: int, *, rows: RowService | None
    ) -> int:
        """Freeze what the coming epoch freezes; return how many blocks. Collective."""
        if not self._handles:
            self._rows = rows
            self.begin(
                model,
                [self._optimizer],
                max_steps=num_batches * self._num_epochs,
                steps_per_epoch=num_batches,
            )
            self._handles = [
                self._optimizer.register_step_pre_hook(self._end_last),
                self._optimizer.register_step_post_hook(self._note),
            ]
        elif self._step:
            # A loop that accumulates takes several batches to a step.
            per_epoch = max(1, round(self._step / epoch))
            self.expect(max_steps=per_epoch * self._num_epochs, steps_per_epoch=per_epoch)
        self._end_last()
        return self.look(self._step, epoch=epoch)

    def close(self, took: str = "") -> None:
        """Watch no more, and say what was seen, and what the loop took."""
        if self._handles:
            self.publish(took)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note(self, *_: Any) -> None:
        self.end_update()
        self._step, self._owes_end = self._step + 1, True

    def _end_last(self, *_: Any) -> None:
        # Only now the schedule has set the next step's rate.
        if self._owes_end:
            self._owes_end = False
            self.end_step(self._step)

"""Ask a policy before each epoch of a loop, whose optimizer tells of its steps."""

from __future__ import annotations

import sys
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from freeze import FreezePolicy, PolicyFunction
from freeze.advisor import Observer, ThawCheck, learning_rates
from pipetransformer.loop.row_service import RowService


@final
class EpochPolicy(Observer):
    """Watch an optimizer's steps, and freeze before each epoch what a policy says.

    Args:
        num_epochs: of the whole loop, as policies ask how far it is.
    """

    def __init__(
        self, policy: FreezePolicy | PolicyFunction, optimizer: Optimizer, num_epochs: int
    ) -> None:
        super().__init__(policy, every_steps=sys.maxsize, act=True)
        self.keeps_outputs = self.asks_first = True
        self._optimizer, self._num_epochs = optimizer, num_epochs
        self._rows: RowService | None = None
        self._step, self._owes_end = 0, False
        self._handles: list[RemovableHandle] = []

    def begin_epoch(self, epoch: int, rows: RowService, num_batches: int) -> int:
        """Freeze what the coming epoch freezes; return how many blocks. Collective."""
        if self._rows is None:
            self._rows = rows
            model = rows.task.model.model
            self.begin(
                model,
                max_steps=num_batches * self._num_epochs,
                steps_per_epoch=num_batches,
                thaw_check=ThawCheck(model, [self._optimizer], is_replicated=rows.world.size > 1),
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
        rate, _ = learning_rates(self._optimizer.param_groups)
        return self.look(self._step, learning_rate=rate, epoch=epoch).num_frozen

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        return list(self._served.row_blocks)

    def thawed_by(self, num_frozen: int) -> dict[str, nn.Parameter]:
        return self._served.thawed_by(num_frozen)

    def carry_out(self, num_frozen: int) -> None:
        self._served.set_depth(num_frozen)

    def agreed(self, num_frozen: int) -> int:
        return self._served.agreed(num_frozen)

    def close(self) -> None:
        """Watch no more."""
        self.end()
        for handle in self._handles:
            handle.remove()

    @property
    def _served(self) -> RowService:
        assert self._rows is not None
        return self._rows

    def _note(self, *_: Any) -> None:
        self.end_update()
        self._step, self._owes_end = self._step + 1, True

    def _end_last(self, *_: Any) -> None:
        # Only now the schedule has set the next step's rate.
        if self._owes_end:
            self._owes_end = False
            rate, peak = learning_rates(self._optimizer.param_groups)
            self.end_step(self._step, learning_rate=rate, peak_learning_rate=peak)

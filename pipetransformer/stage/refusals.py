"""Refuse to go on training, on all ranks alike, and say what was wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from torch import Tensor

from autopipe.loss import SplitProbe
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import Rows
from pipetransformer.model import Task
from pipetransformer.processes import World
from pipetransformer.stage.diagnosis import Origin, before_the_step, first_cause
from pipetransformer.stage.step_result import StepSums
from pipetransformer.stage.work import MicroBatches

_LOGGER = logging.getLogger(__name__)


@final
class Refusals:
    """Raise where a step must not be followed by another.

    Args:
        trained: the sublayers that this rank trains.
        reads: whether this rank reads samples.
        probe: compares losses of the steps.
    """

    def __init__(
        self, task: Task, world: World, trained: range, *, reads: bool, probe: SplitProbe
    ) -> None:
        self._task, self._world, self._reads, self._probe = task, world, reads, probe
        self._trained = range(0 if reads else trained.start, trained.stop)

    def check(self, steps: Sequence[StepSums], wrong: str, *, first_step: int) -> None:
        """Refuse to go on, on all ranks alike.

        Args:
            steps: what all ranks told of one step or several.
            wrong: what this rank found wrong, or "".
        """
        if any(one.split for one in steps):
            self._probe.refuse()
        if any(one.wrong for one in steps):
            raise ValueError(wrong or "another rank refuses to go on; it says why")
        # A later batch may have nothing to learn from.
        if first_step == 0 and not any(one.trained for one in steps):
            raise ValueError(
                f"the loss {self._task.loss_fn.name!r} has no gradient by the model's output, and "
                "nothing would train; do not detach it"
            )

    def before(self, step: int, batches: MicroBatches) -> Origin | None:
        """Say what was not finite before a step: the samples, or weights that were given."""
        checked = self._trained if step == 0 else ()
        return before_the_step(self._task, checked, rows=batches.rows, ids=self._read(batches.ids))

    def cause_in_samples(self, ids: Tensor, rows: Rows) -> str:
        """Say what is not finite in a step's samples, and what to do, or "". Collective."""
        before = before_the_step(self._task, (), rows=rows, ids=self._read(ids))
        cause = first_cause(before, self._world)
        return f"{cause.where}. {cause.advice}" if cause else ""

    def tell_of_nonfinite(self, what: str, origin: Origin) -> None:
        """Say where a number that is not finite began: raise, or warn on rank 0."""
        if self._task.config.on_nonfinite == "raise":
            raise NonFiniteError(f"{what}; {origin.where}. {origin.advice}")
        if self._world.is_main:
            _LOGGER.warning("%s; %s: the step is skipped on all ranks", what, origin.where)

    def _read(self, ids: Tensor) -> Tensor:
        return ids if self._reads else ids[:0]

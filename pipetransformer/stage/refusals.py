"""Refuse to go on training, on all ranks alike, and say what was wrong."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from torch import Tensor

from autopipe.loss import SplitProbe
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import Rows
from pipetransformer.stage.diagnosis import (
    Finding,
    before_the_step,
    first_cause,
    where_it_began,
)
from pipetransformer.stage.step_result import StepSums
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import MicroBatches

_LOGGER = logging.getLogger(__name__)


@final
class Refusals:
    """Raise where a step must not be followed by another.

    Args:
        probe: compares losses of the steps.
    """

    def __init__(self, wiring: StageWiring, probe: SplitProbe) -> None:
        self._task, self._world, self._probe = wiring.task, wiring.world, probe
        self._reads = wiring.index == 0  # Stage 0 holds the frozen prefix, too.
        self._held = range(0 if self._reads else wiring.indices.start, wiring.indices.stop)

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

    def nonfinite(self, what: str, step: int, batches: MicroBatches, own: Finding) -> None:
        """Say where a number that is not finite began: raise, or warn on rank 0. Collective.

        Args:
            what: is not finite.
            own: what of it is this rank's.
        """
        held = self._held if step == 0 else ()
        before = before_the_step(self._task, held, rows=batches.rows, ids=self._read(batches.ids))
        origin = where_it_began(self._task, self._world, own, before)
        if self._task.config.on_nonfinite == "raise":
            raise NonFiniteError(f"{what}; {origin.where}. {origin.advice}")
        if self._world.is_main:
            _LOGGER.warning("%s; %s: the step is skipped on all ranks", what, origin.where)

    def cause_in_samples(self, ids: Tensor, rows: Rows) -> str:
        """Say what is not finite in a step's samples, and what to do, or "". Collective."""
        before = before_the_step(self._task, (), rows=rows, ids=self._read(ids))
        cause = first_cause(before, self._world)
        return f"{cause.where}. {cause.advice}" if cause else ""

    def _read(self, ids: Tensor) -> Tensor:
        return ids if self._reads else ids[:0]

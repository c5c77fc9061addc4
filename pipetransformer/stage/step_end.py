"""End a step: join its loss, sum, scale and clip its gradients, update or skip.

Either the host decides, once all ranks have told their sums, or a run's only GPU does (see
`device_end`).
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from autopipe.loss import mean_and_correction
from pipetransformer.feed import ComingStep
from pipetransformer.model import LossScale
from pipetransformer.processes import World
from pipetransformer.stage.diagnosis import where_it_began
from pipetransformer.stage.refusals import Refusals
from pipetransformer.stage.step_result import Numbers, StepNumbers, StepSums
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import TrainWork
from pipetransformer.stage.world_sums import WorldSums

_LOGGER = logging.getLogger(__name__)


class StepEnd(ABC):
    """End a step.

    Attributes:
        waits: whether it waits for the device, so that all time is known when it returns.
    """

    waits = True

    def begin(self) -> None:  # noqa: B027 - nothing to prepare where the host decides
        """Prepare for a step; raise a NonFiniteError where none may follow."""

    @abstractmethod
    def finish(
        self,
        coming: ComingStep,
        work: TrainWork,
        spent_s: dict[str, float],
        *,
        wrong: str,
        stops: bool,
    ) -> tuple[Numbers, StepSums]:
        """Update by the gradients of a step, or skip it; add to the seconds spent. Collective.

        Args:
            wrong: what this rank found wrong, or "".
            stops: whether it asks to end the run.
        Raises:
            ValueError: on all ranks, if one has found something wrong.
            NonFiniteError: a number is not finite, with on_nonfinite="raise".
        """


@final
class HostEnd(StepEnd):
    """End a step by numbers on the host, summed over all ranks."""

    def __init__(
        self,
        wiring: StageWiring,
        world: World,
        part: TrainedPart,
        *,
        sums: WorldSums,
        refusals: Refusals,
        loss_scale: LossScale,
    ) -> None:
        self._task, self._world, self._part = wiring.task, world, part
        self._settle = wiring.settle
        self._sums, self._refusals, self._scale = sums, refusals, loss_scale
        # A spare has nothing to sum: it waits.
        self._spent_on = "bubble" if wiring.is_spare else "all_reduce"

    def finish(
        self,
        coming: ComingStep,
        work: TrainWork,
        spent_s: dict[str, float],
        *,
        wrong: str,
        stops: bool,
    ) -> tuple[Numbers, StepSums]:
        start, part, reducer = time.perf_counter(), self._part, self._part.reducer
        # What one rank finds wrong must end all ranks alike: a rank that raised by itself would
        # leave the others waiting.
        was_early = reducer is not None and reducer.was_early
        own = work.sums(early=was_early, wrong=bool(wrong), stops=stops)
        is_alone = self._world.group is None
        sums = own if is_alone else StepSums.of(self._sums.of(own.as_list()))
        if reducer is not None:
            reducer.finish(again=sums.early > 0)
        part.ties.sum()
        spent_s[self._spent_on] += time.perf_counter() - start
        self._refusals.check([sums], wrong, first_step=coming.step)
        loss, norm = self._finish_gradients(sums, len(coming.ids))
        skipped = self._must_skip(coming.step, loss, norm, work)
        if reducer is not None:
            reducer.own_gradients.clear()
        if not skipped:
            part.update(coming)
        return StepNumbers(loss, norm, skipped), sums

    def _finish_gradients(self, sums: StepSums, num_samples: int) -> tuple[float, float]:
        """Scale the gradients to the mean's, measure and clip them; return (mean loss, norm)."""
        gradients, signals = self._part.gradients, self._part.signals
        mean, correction = mean_and_correction(sums.loss, sums.count, num_samples)
        factor = (1.0 if correction is None else float(correction)) / self._scale.value
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        squared = signals.squared_norm(self._over_stages)
        # NaN >= 0 is false; math.sqrt would raise for a negative sum.
        norm = math.sqrt(value) if (value := float(squared)) >= 0 else math.nan
        if math.isfinite(norm):
            signals.add_gradients()
        limit = self._task.config.max_grad_norm
        if limit is not None and norm > limit and gradients:
            # The same factor as torch.nn.utils.clip_grad_norm_ has.
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return float(mean), norm

    def _over_stages(self, square: Tensor) -> Tensor:
        """Return the whole model's squared norm, by this stage's. Collective."""
        self._settle()  # Here and no sooner: the norm is launched, and the host waits for it.
        return self._sums.over_stages(square)

    def _must_skip(self, step: int, loss: float, norm: float, work: TrainWork) -> bool:
        """Return whether all ranks skip the step; raise where it ends the run. Collective."""
        scale = self._scale
        if math.isfinite(loss) and math.isfinite(norm):
            scale.note_good_step()
            return False
        what = f"step {step}: the loss is {loss}, the gradient's norm {norm}"
        if not scale.explains(loss, norm):
            origin = where_it_began(
                self._task,
                self._world,
                self._part.indices,
                loss=float(work.loss.sums()[0]),
                reducer=self._part.reducer,
                before=self._refusals.before(step, work.batches),
            )
            self._refusals.tell_of_nonfinite(what, origin)
            return True
        if self._world.is_main:
            text = "%s at a loss scale of %g, which is halved: the step is skipped on all ranks"
            _LOGGER.info(text, what, scale.value)
        scale.shrink()
        return True

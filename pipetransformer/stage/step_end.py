"""End a step: join its loss, sum, scale and clip its gradients, update or skip.

Either the host decides, once all ranks have told their sums, or the GPUs do (see `device_end`).
Both compute alike: `step_factors`.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from autopipe.loss import mean_and_correction
from freeze.signals import Measured
from pipetransformer.feed import ComingStep
from pipetransformer.model import LossScale, trained_parameters
from pipetransformer.stage.refusals import Finding, Refusals
from pipetransformer.stage.step_result import LateNumbers, StepNumbers, StepSums
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.wiring import StageWiring
from pipetransformer.stage.work import TrainWork

_LOGGER = logging.getLogger(__name__)


class StepEnd(ABC):
    """End a step."""

    def __init__(self, wiring: StageWiring, part: TrainedPart, refusals: Refusals) -> None:
        self._wiring, self._part, self._refusals = wiring, part, refusals
        # A spare has nothing to sum: it waits.
        self._spent_on = "bubble" if wiring.is_spare else "all_reduce"

    def begin(self) -> None:  # noqa: B027 - nothing to prepare where the host decides
        """Prepare for a step; raise a NonFiniteError where none may follow."""

    @abstractmethod
    def finish(
        self, coming: ComingStep, work: TrainWork, *, wrong: str, stops: bool
    ) -> StepNumbers | LateNumbers:
        """Update by the gradients of a step, or skip it. Collective.

        Args:
            wrong: what this rank found wrong, or "".
            stops: whether it asks to end the run.
        Raises:
            ValueError: on all ranks, if one has found something wrong.
            NonFiniteError: a number is not finite, with on_nonfinite="raise".
        """


@dataclass(frozen=True)
class StepFactors:
    """Say what follows from a step's sums; 0-dim float64, None is a factor of 1.

    Args:
        loss: the mean over the global batch.
        norm: of the mean's gradient, before clipping.
        correction: the factor from the gradients so far to the mean's.
        factor: that, and clipping.
    """

    loss: Tensor
    norm: Tensor
    correction: Tensor | None
    factor: Tensor | None


def step_factors(
    total: Tensor, count: Tensor | float, squares: Tensor, *, divisor: float, limit: float | None
) -> StepFactors:
    """Return what follows from the losses' sum and count, and the gradient's squared norm.

    Nothing here waits for a device.

    Args:
        divisor: of the gradients so far, see `BatchMean`.
        limit: on the norm.
    """
    loss, correction = mean_and_correction(total, count, divisor)
    assert isinstance(loss, Tensor)
    if isinstance(correction, float):
        correction = torch.tensor(correction, dtype=torch.float64)
    norm = squares.sqrt()
    if correction is not None:
        norm = norm * correction.abs()
    factor = correction
    if limit is not None:
        # The same factor as torch.nn.utils.clip_grad_norm_ has. A 0-dim tensor in host memory
        # goes into one launch; a Python number divides in two.
        most = torch.tensor(limit, dtype=torch.float64)
        clip = torch.div(most, norm + 1e-6).masked_fill(norm <= limit, 1.0)
        factor = clip if factor is None else factor * clip
    return StepFactors(loss, norm, correction, factor)


class _Clock:
    """Tell apart what the end of a step waits for: the backward's kernels, and sums.

    On a GPU the first wait is for both. Events in its stream tell when the first had ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._on_gpu = device.type == "cuda"
        self.computed_s = self.summed_s = 0.0
        self._mark()
        self._begun = self._started = time.perf_counter()

    def stop(self) -> None:
        """End a time of sums."""
        self.summed_s += time.perf_counter() - self._started
        if len(self._events) == 1:
            self._mark()

    def start(self) -> None:
        """Begin a time of sums; at first, once the GPU has been waited for."""
        self._started = time.perf_counter()
        if self._events:
            first, second = self._events
            waited_s, self._events = self._started - self._begun, []
            self.summed_s = min(first.elapsed_time(second) / 1e3, waited_s)
            self.computed_s = waited_s - self.summed_s

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)


@final
class HostEnd(StepEnd):
    """End a step by numbers on the host, summed over all ranks."""

    def __init__(
        self, wiring: StageWiring, part: TrainedPart, refusals: Refusals, loss_scale: LossScale
    ) -> None:
        super().__init__(wiring, part, refusals)
        self._scale = loss_scale

    def finish(
        self, coming: ComingStep, work: TrainWork, *, wrong: str, stops: bool
    ) -> StepNumbers:
        part, reducer, clock = self._part, self._part.reducer, _Clock(self._wiring.device)
        if reducer is not None:
            reducer.finish()
        untied = part.ties.sum()
        clock.stop()
        measured = part.signals.measure()
        # What one rank finds wrong must end all ranks alike: a rank that raised by itself would
        # leave the others waiting.
        was_early = reducer is not None and reducer.was_early
        own = work.findings(early=was_early, wrong=bool(wrong), stops=stops)
        sums = self._told(own, work, measured, clock)
        if sums.early:
            for parameter, gradient in untied.items():
                parameter.grad = gradient
            if reducer is not None:
                reducer.repeat()
            part.ties.sum()
            measured = part.signals.measure()
            sums = self._told(own, work, measured, clock)
        work.spent_s["compute"] += clock.computed_s
        work.spent_s[self._spent_on] += clock.summed_s
        self._refusals.check([sums], wrong, first_step=coming.step)
        loss, norm = self._finish_gradients(sums, measured, work.loss.divisor)
        skipped = self._must_skip(coming.step, loss, norm, work)
        if reducer is not None:
            reducer.own_gradients.clear()
        if not skipped:
            part.update(coming)
        return StepNumbers(loss, norm, skipped, sums)

    def _told(self, own: StepSums, work: TrainWork, measured: Measured, clock: _Clock) -> StepSums:
        """Return all ranks' sums, with the losses' and the gradient's squared norm. Collective.

        The one wait of a step's end for a GPU, and the one sum over all ranks.
        """
        total = measured.sums[-1]
        loss, count, squares = _read((*work.loss.sums(), total), total.device)
        clock.start()
        self._wiring.settle()
        if not self._wiring.speaks_for_stage:  # Ranks of a stage hold equal gradients.
            squares = 0.0
        own = replace(own, loss=loss, count=count, squares=squares)
        sums = StepSums(*self._wiring.sums_of(own.as_list()))
        clock.stop()
        return sums

    def _finish_gradients(
        self, sums: StepSums, measured: Measured, divisor: float
    ) -> tuple[float, float]:
        """Scale the gradients to the mean's, and clip them; return (mean loss, norm)."""
        gradients, signals = self._part.gradients, self._part.signals
        numbers = torch.tensor((sums.loss, sums.count, sums.squares), dtype=torch.float64)
        limit = self._wiring.task.config.max_grad_norm
        step = step_factors(*numbers.unbind(), divisor=divisor, limit=limit)
        loss, norm, correction = float(step.loss), float(step.norm), step.correction
        if math.isfinite(norm):
            signals.add(measured, scale=correction)
            signals.add_gradients(scale=1.0 if correction is None else float(correction))
        factor = 1.0 if step.factor is None else float(step.factor)
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)
        return loss, norm

    def _must_skip(self, step: int, loss: float, norm: float, work: TrainWork) -> bool:
        """Return whether all ranks skip the step; raise where it ends the run. Collective."""
        scale = self._scale
        if math.isfinite(loss) and math.isfinite(norm):
            scale.note_good_step()
            return False
        what = f"step {step}: the loss is {loss}, the gradient's norm {norm}"
        if not scale.explains(loss, norm):
            self._refusals.nonfinite(what, step, work.batches, self._found(work))
            return True
        if self._wiring.world.is_main:
            text = "%s at a loss scale of %g, which is halved: the step is skipped on all ranks"
            _LOGGER.info(text, what, scale.value)
        scale.shrink()
        return True

    def _found(self, work: TrainWork) -> Finding:
        """Return what is not finite on this rank."""
        part, found = self._part, Finding(not math.isfinite(float(work.loss.sums()[0])))
        # They are still beside the replicas' sums.
        own = {} if part.reducer is None else part.reducer.own_gradients
        for index in part.indices:
            parameters = trained_parameters(self._wiring.task, (index,)).values()
            if _has_nonfinite(p.grad for p in parameters):
                brought = _has_nonfinite(own.get(p, p.grad) for p in parameters)
                found = Finding(found.in_loss, index, brought)
        return found


def _has_nonfinite(gradients: Iterable[Tensor | None]) -> bool:
    return any(one is not None and not bool(one.isfinite().all()) for one in gradients)


def _read(numbers: Sequence[Tensor | float], device: torch.device) -> list[float]:
    """Return numbers, 0-dim float64 where they are on a device, by one copy from there."""
    there = {
        place: one
        for place, one in enumerate(numbers)
        if isinstance(one, Tensor) and one.device == device
    }
    read = dict(zip(there, torch.stack([*there.values()]).tolist(), strict=True))
    return [read[place] if place in read else float(one) for place, one in enumerate(numbers)]

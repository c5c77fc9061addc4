"""End a step on a run's only GPU without waiting for it: decide there, and tell a step late.

    host    launch t | read t - 1 | launch t + 1  | read t       | ...
    GPU     ... t - 1 | t: forward, backward, end | t + 1 ...

Whether a step is skipped, and the factor on its gradients, follow from numbers that the GPU has.
A flag in GPU memory tells the optimizer to leave its weights and moments alone. Who reads a step's
numbers does so when the next one is launched; a number that is not finite is refused then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopipe.loss import mean_and_correction
from freeze.signals import IntervalSignals
from pipetransformer.config import TrainConfig
from pipetransformer.errors import NonFiniteError
from pipetransformer.feed import ComingStep
from pipetransformer.stage.diagnosis import Origin
from pipetransformer.stage.refusals import Refusals
from pipetransformer.stage.step_end import StepEnd
from pipetransformer.stage.step_result import Numbers, StepNumbers, StepSums
from pipetransformer.stage.trained_part import TrainedPart
from pipetransformer.stage.work import MicroBatches, TrainWork


@final
class LateNumbers:
    """Hold a step's numbers, which the GPU is still to compute.

    Args:
        values: (n,) float64 on the GPU: loss, gradient's norm, whether the step was skipped, and
            the squared norms of the gradient's parts.
        judge: is given the values when they are first read, and may raise.
    """

    def __init__(self, values: Tensor, judge: Callable[[list[float]], None]) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        # A blocking event lets this thread sleep, while another writes the cache's rows.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self._judge = judge
        self._numbers: StepNumbers | None = None

    def __call__(self) -> StepNumbers:
        """Return the numbers once the GPU has computed them."""
        if self._numbers is None:
            self._event.synchronize()
            loss, norm, skipped, *_ = values = self._host.tolist()
            self._numbers = StepNumbers(loss, norm, bool(skipped))
            self._judge(values)
        return self._numbers


@final
class DeviceEnd(StepEnd):
    """Scale and clip the gradients of a step, update or skip, on the device.

    Args:
        part: with an optimizer that must fit, see `fits`.
    """

    def __init__(
        self, config: TrainConfig, part: TrainedPart, refusals: Refusals, device: torch.device
    ) -> None:
        assert part.optimizer is not None
        self._part, self._optimizer, self._refusals = part, part.optimizer, refusals
        self._limit, self._keeps_bad = config.max_grad_norm, config.on_nonfinite == "raise"
        # A 0-dim tensor in host memory goes into one launch; a Python number divides in two.
        self._most = torch.tensor(self._limit or 0.0, dtype=torch.float64)
        # Whether a step was bad; in place, as a graph's kernels write it, too.
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._ended = ""

    @staticmethod
    def fits(optimizer: Optimizer | None, signals: IntervalSignals) -> bool:
        """Return whether the update can be left out by a flag on the device.

        torch's fused Adam and AdamW do so; its fused SGD would leave a first momentum unset.
        Signals that sum gradients take finite ones alone, which the host must know.
        """
        heeds_flag = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        return heeds_flag and not signals.needs_finite

    def begin(self) -> None:
        if self._ended:  # All updates are held back from then on.
            raise NonFiniteError(self._ended)

    def finish(
        self,
        coming: ComingStep,
        work: TrainWork,
        spent_s: dict[str, float],
        *,
        wrong: str,
        stops: bool,
    ) -> tuple[Numbers, StepSums]:
        start = time.perf_counter()
        found = work.findings(wrong=bool(wrong), stops=stops)
        self._refusals.check([found], wrong, first_step=coming.step)
        values = work.values
        if values is None:
            values = self.scaled(work)
            self._part.update(coming)
        judge = partial(self._judge, step=coming.step, batches=work.batches)
        numbers = LateNumbers(values, judge)
        spent_s["compute"] += time.perf_counter() - start
        return numbers, found

    @torch.no_grad()
    def scaled(self, work: TrainWork) -> Tensor:
        """Scale and clip the gradients, and have a bad step skipped; return its numbers, (n,)."""
        loss, correction = loss_and_correction(work)
        squares, square = self._part.signals.squared_norms(scale=correction)
        norm = square.sqrt()
        # inf - inf and anything with NaN is NaN, which differs from 0.
        bad = (loss + norm) - (loss + norm) != 0
        values = torch.cat((torch.stack((loss, norm, bad.double())), squares))
        self._scale(correction, norm)
        self._heed(bad)
        return values

    def _judge(self, values: list[float], *, step: int, batches: MicroBatches) -> None:
        """Raise, or warn, where a step's numbers are not finite."""
        loss, norm, skipped, *_ = values
        if not skipped:
            return
        what = f"step {step}: the loss is {loss}, the gradient's norm {norm}"
        if self._keeps_bad:
            self._ended = (
                f"{what}, and the run ended there; resume from a checkpoint, or start another "
                "Trainer, perhaps with on_nonfinite='skip'"
            )
        where = where_in(values, self._part.signals.part_names)
        self._refusals.tell_of_nonfinite(
            what, self._refusals.before(step, batches) or Origin(where)
        )

    def _scale(self, correction: Tensor | None, norm: Tensor) -> None:
        """Scale the gradients to the mean's, and clip them."""
        factor = correction
        if self._limit is not None:
            clip = torch.div(self._most, norm + 1e-6).masked_fill(norm <= self._limit, 1.0)
            factor = clip if factor is None else factor * clip
        gradients = self._part.gradients
        if factor is None or not gradients:
            return
        for dtype in {g.dtype for g in gradients}:  # One launch for all of a dtype.
            alike = [g for g in gradients if g.dtype == dtype]
            torch._foreach_mul_(alike, factor.to(dtype))

    def _heed(self, bad: Tensor) -> None:
        """Have the optimizer leave out the update of a step that is bad."""
        bad = self._bad.logical_or_(bad) if self._keeps_bad else bad
        # Where torch's fused optimizers look for it, as GradScaler tells them.
        self._optimizer.found_inf = bad.float()  # type: ignore[attr-defined]


def loss_and_correction(work: TrainWork) -> tuple[Tensor, Tensor | None]:
    """Return a step's mean loss, and the factor on its gradients; None is 1."""
    total, count = work.loss.sums()
    assert isinstance(total, Tensor), "a loss with a gradient is a tensor"
    loss, correction = mean_and_correction(total, count, len(work.batches.ids))
    assert isinstance(loss, Tensor) and not isinstance(correction, float)
    return loss, correction


def where_in(values: Sequence[float], sublayers: Sequence[str]) -> str:
    """Say where a number that is not finite began, by the values of `LateNumbers`.

    Args:
        sublayers: names of those that the parts are of, in order.
    """
    loss, _, _, *squares = values
    if not math.isfinite(loss):
        return "it began before the backward, in the loss of rank 0"
    bad = [n for n, square in zip(sublayers, squares, strict=True) if not math.isfinite(square)]
    if not bad:
        return "every single value is finite, but their sum is too large for a number"
    return f"it began in the gradient of sublayer {bad[-1]!r} on rank 0"

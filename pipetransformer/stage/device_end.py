"""End a step on a run's only GPU without waiting for it: decide there, and tell a step late.

    host    launch t | read t - 1 | launch t + 1  | read t       | ...
    GPU     ... t - 1 | t: forward, backward, end | t + 1 ...

Whether a step is skipped, and the factor on its gradients, follow from numbers that the GPU has.
A flag in GPU memory tells the optimizer to leave its weights and moments alone. The host reads a
step's numbers when it has launched the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from freeze.signals import IntervalSignals
from pipetransformer.stage.step_result import StepNumbers


@final
class LateNumbers:
    """Hold a step's numbers, which the GPU is still to compute.

    Args:
        step: of the run.
        values: (n,) float64 on the GPU: loss, gradient's norm, whether the step was skipped, and
            the squared norms of the gradient's parts.
    """

    def __init__(self, step: int, values: Tensor) -> None:
        self.step = step
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        # A blocking event lets this thread sleep, while another writes the cache's rows.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()
        self._values: list[float] | None = None

    def wait(self) -> list[float]:
        """Return the values once the GPU has computed them."""
        if self._values is None:
            self._event.synchronize()
            self._values = self._host.tolist()
        return self._values

    def numbers(self) -> StepNumbers:
        loss, norm, skipped, *_ = self.wait()
        return StepNumbers(loss, norm, bool(skipped))


@final
class DeviceEnd:
    """Scale and clip the gradients of a step, update or skip, on the device.

    Args:
        optimizer: of the parameters; must fit, see `fits`.
        max_grad_norm: limit of the gradient's norm; None for none.
        keeps_bad: whether a number that is not finite ends the run, so that no update follows.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        signals: IntervalSignals,
        parameters: Mapping[str, nn.Parameter],
        *,
        max_grad_norm: float | None,
        keeps_bad: bool,
    ) -> None:
        self._optimizer, self._signals = optimizer, signals
        self._parameters = list(parameters.values())
        self._limit, self._keeps_bad = max_grad_norm, keeps_bad
        # A 0-dim tensor in host memory goes into one launch; a Python number divides in two.
        self._most = torch.tensor(max_grad_norm or 0.0, dtype=torch.float64)
        self._bad: Tensor | None = None

    @staticmethod
    def fits(optimizer: Optimizer | None, signals: IntervalSignals) -> bool:
        """Tell whether the update can be left out by a flag on the device.

        torch's fused Adam and AdamW do so; its fused SGD would leave a first momentum unset.
        Signals that sum gradients take finite ones alone, which the host must know.
        """
        heeds_flag = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        return heeds_flag and not signals.needs_finite

    @torch.no_grad()
    def finish(
        self,
        step: int,
        losses: Sequence[tuple[Tensor | float, Tensor | float]],
        num_samples: int,
    ) -> LateNumbers:
        """Prepare the optimizer's step, which must follow and updates, or leaves all as it is.

        Args:
            losses: sums and counts of the step's micro-batches.
            num_samples: the losses were divided by it so far.
        """
        total, count = (reduce(add, column) for column in zip(*losses, strict=True))
        correction, loss = _mean(total, count, num_samples)
        squares, square = self._signals.squared_norms(scale=correction)
        norm = square.sqrt()
        # inf - inf and anything with NaN is NaN, which differs from 0.
        bad = (loss + norm) - (loss + norm) != 0
        values = torch.cat((torch.stack((loss, norm, bad.double())), squares))
        self._scale(correction, norm)
        self._heed(bad)
        return LateNumbers(step, values)

    def _scale(self, correction: Tensor | None, norm: Tensor) -> None:
        """Scale the gradients to the mean's, and clip them."""
        factor = correction
        if self._limit is not None:
            clip = torch.div(self._most, norm + 1e-6).masked_fill(norm <= self._limit, 1.0)
            factor = clip if factor is None else factor * clip
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if factor is None or not gradients:
            return
        for dtype in {g.dtype for g in gradients}:  # One launch for all of a dtype.
            alike = [g for g in gradients if g.dtype == dtype]
            torch._foreach_mul_(alike, factor.to(dtype))

    def _heed(self, bad: Tensor) -> None:
        """Have the optimizer leave out the update of a step that is bad."""
        if self._keeps_bad:
            bad = bad if self._bad is None else bad | self._bad
            self._bad = bad
        # Where torch's fused optimizers look for it, as GradScaler tells them.
        self._optimizer.found_inf = bad.float()  # type: ignore[attr-defined]


def _mean(
    total: Tensor | float, count: Tensor | float, num_samples: int
) -> tuple[Tensor | None, Tensor]:
    """Return the factor from a sum's gradients to the mean's, and the mean loss.

    Both are 0-dim float64; a factor of None is 1. Where nothing counts the mean is 0. A loss
    without a count gives a mean that is not finite.
    """
    assert isinstance(total, Tensor), "a loss with a gradient is a tensor"
    if not isinstance(count, Tensor):
        assert count == num_samples, "what is counted on the host are samples"
        return None, total / count
    every = torch.tensor(float(num_samples), dtype=torch.float64)
    # torch.where would copy a Python number to the GPU, and wait.
    count = count.masked_fill((count == 0) & (total == 0), num_samples)
    return torch.div(every, count), total / count


def where_in(values: Sequence[float], sublayers: Sequence[str]) -> str:
    """Say where a number that is not finite began, by what `LateNumbers.wait` returns.

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

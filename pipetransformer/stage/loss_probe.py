"""Find out whether a loss that nobody knows joins from parts to the whole.

    step       0 1 2 3 4 5 6 7 8 ...  16 ...  24 ...
    probed     * * * * * * * * *       *       *

Values are compared, and gradients by the output. The first steps tell of most losses, and those
after them of what comes up later, such as ignored targets; what is rare may stay unseen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import Tensor

from pipetransformer.loss import Loss, mean_of

if TYPE_CHECKING:
    from pipetransformer.loss import LossValue

_LOGGER = logging.getLogger(__name__)

_FIRST_STEPS = 8
_PERIOD_STEPS = 8

_MOST_ELEMENTS = 1 << 22
"""Elements of the outputs that are kept to probe: 16 MiB of float32."""

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 3e-4,
    torch.float16: 2e-3,
}
"""Relative; float32 allows for a GPU's TF32 within the loss, half precision for its own rounding
of the whole, and of the parts."""
_COARSEST = 1.6e-2


@final
@dataclass(frozen=True)
class _Part:
    """Hold the outputs and targets of some samples."""

    output: Tensor
    target: Tensor | Mapping[str, Tensor]

    def rows(self, first: int, last: int) -> _Part:
        """Return a copy of samples first..last-1, as a loss may write into what it is given."""
        return _Part(
            self.output.detach()[first:last].clone(),
            self.target[first:last].clone()
            if isinstance(self.target, Tensor)
            else {name: one[first:last].clone() for name, one in self.target.items()},
        )

    def widened(self) -> _Part:
        """Return the samples in at least single precision."""
        return _Part(
            _widened(self.output),
            _widened(self.target)
            if isinstance(self.target, Tensor)
            else {name: _widened(one) for name, one in self.target.items()},
        )

    def fits(self, other: _Part) -> bool:
        """Tell whether samples of both make one batch."""
        return self._shapes() == other._shapes()

    def _shapes(self) -> dict[str, torch.Size]:
        targets = {"": self.target} if isinstance(self.target, Tensor) else self.target
        return {
            "output": self.output.shape[1:],
            **{f"target {name}": one.shape[1:] for name, one in targets.items()},
        }


@final
class SplitProbe:
    """Compare the loss of several samples with the one that is joined from their parts.

    The parts are a step's own micro-batches, as far as `_MOST_ELEMENTS` goes, or two parts of the
    only one. The loss is called on copies and torch's random numbers are put back; but one
    that counts its calls counts these too, unless it is wrapped in an exact `Loss`.

    Args:
        loss_fn: is let alone if it is known to be exact.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._step = -1
        self._parts: list[_Part] = []
        self._is_random = False
        self._difference = ""

    def begin_step(self) -> None:
        """Count a step, and forget the one before."""
        self._step += 1
        self._parts = []

    def watch(self, output: Tensor, target: Any) -> None:
        """Keep what a micro-batch's loss is about to be computed from, if this step is probed."""
        is_due = self._step < _FIRST_STEPS or self._step % _PERIOD_STEPS == 0
        if self._loss_fn.is_exact or self._is_random or not is_due:
            return
        part = _Part(output, target)
        if self._parts and not part.fits(self._parts[0]):
            return
        of_a_sample = max(1, output.numel() // len(output))
        num_kept = sum(len(one.output) for one in self._parts)
        num_rows = max(_MOST_ELEMENTS // of_a_sample, 2) - num_kept
        if num_rows > 0:
            self._parts.append(part.rows(0, num_rows))

    def finds_difference(self) -> bool:
        """Compare what was kept of this step; call it after the step's last loss."""
        parts, self._parts = _at_least_two(self._parts), []
        if len(parts) < 2:
            return False
        parts = [_join(parts), *parts]
        try:
            # A loss in half precision could hide a difference of a percent.
            wide = [part.widened() for part in parts]
            (values, gradients), parts = self._values(wide), wide
        except RuntimeError:  # Such as a weight in half precision.
            values, gradients = self._values(parts)
        if self._is_random:
            _LOGGER.warning(
                "the loss %r draws random numbers: whether it depends on how a batch is split "
                "cannot be found out",
                self._loss_fn.name,
            )
            return False
        self._difference = _describe_difference(values, parts)
        if not self._difference and _gradients_differ(values, gradients, parts):
            self._difference = ": its value joins, but its gradient by the output does not"
        return bool(self._difference)

    def refuse(self) -> NoReturn:
        """Refuse the loss, here or on another rank found to depend on the split.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"the loss {self._loss_fn.name!r} depends on how a batch is split into micro-batches "
            f"and replicas{self._difference}. Where targets are weighted or ignored, return "
            "(sum, count): the sum of the losses, and the number or weight of the targets that "
            "count; torch's own modules and functions, such as nn.CrossEntropyLoss(weight=...), "
            "are joined so if they are given as they are. A function that is known to be right "
            "can be given as pipetransformer.loss.Loss(function, is_exact=True)"
        )

    def _values(self, parts: list[_Part]) -> tuple[list[LossValue], list[Tensor | None]]:
        """Compute each part's loss and gradient, and note whether that draws random numbers."""
        device = parts[0].output.device
        values: list[LossValue] = []
        gradients: list[Tensor | None] = []
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            before = _random_states(device)
            for part in parts:
                output = part.output.clone().requires_grad_(part.output.is_floating_point())
                # Not a leaf, which a loss could not work on in place.
                value = self._loss_fn(output.clone(), part.target)
                total, gradient = _total_of(value), None
                if total.requires_grad:
                    (gradient,) = torch.autograd.grad(total, output, allow_unused=True)
                values.append(_detached(value))
                gradients.append(gradient)
            self._is_random = not all(map(torch.equal, before, _random_states(device)))
        return values, gradients


def _at_least_two(parts: list[_Part]) -> list[_Part]:
    """Cut the only part in two, if it has two samples."""
    if len(parts) != 1:
        return parts
    size = len(parts[0].output)
    # Unequal parts tell more; but a single sample is a part only where it has to be.
    cut = max(size // 3, min(2, size // 2))
    return [parts[0].rows(0, cut), parts[0].rows(cut, size)] if cut else parts


def _describe_difference(values: list[LossValue], parts: list[_Part]) -> str:
    """Say how the whole's loss differs from what its parts' join to; "" where it does not.

    Args:
        values: the loss of the whole, and those of the parts.
        parts: the whole and the parts.
    """
    sizes = [len(part.output) for part in parts]
    pairs = [_as_pair(value, size) for value, size in zip(values, sizes, strict=True)]
    totals, counts = zip(*pairs, strict=True)
    dtypes = (parts[0].output.dtype, _total_of(values[0]).dtype)
    tolerance = max(_TOLERANCES.get(dtype, _COARSEST) for dtype in dtypes)
    if _joins(totals, tolerance) and _joins(counts, tolerance):
        return ""
    whole, joined = mean_of(totals[0], counts[0]), mean_of(sum(totals[1:]), sum(counts[1:]))
    return (
        f": it is {whole:.6g} over {sizes[0]} samples, but {joined:.6g} when joined from parts "
        f"of {', '.join(map(str, sizes[1:]))}"
    )


def _gradients_differ(
    values: list[LossValue], gradients: list[Tensor | None], parts: list[_Part]
) -> bool:
    """Compare the gradient of the whole, its samples counted, with those of the parts."""
    if any(gradient is None for gradient in gradients):
        return any(gradient is not None for gradient in gradients)
    scaled = [
        gradient if isinstance(value, tuple) else gradient * len(part.output)
        for value, gradient, part in zip(values, gradients, parts, strict=True)
        if gradient is not None
    ]
    whole, joined = scaled[0].double(), torch.cat(scaled[1:]).double()
    if not bool(whole.isfinite().all()):
        return False
    tolerance = max(_TOLERANCES.get(one.dtype, _COARSEST) for one in (scaled[0], parts[0].output))
    return not float((whole - joined).abs().max()) <= tolerance * float(whole.abs().max())


def _detached(value: LossValue) -> LossValue:
    if isinstance(value, tuple):
        total, count = value
        return total.detach(), count.detach() if isinstance(count, Tensor) else count
    return value.detach()


def _join(parts: list[_Part]) -> _Part:
    output = torch.cat([part.output for part in parts])
    targets = [part.target for part in parts]
    first = targets[0]
    if isinstance(first, Tensor):
        return _Part(output, torch.cat([one for one in targets if isinstance(one, Tensor)]))
    return _Part(
        output,
        {
            name: torch.cat([one[name] for one in targets if not isinstance(one, Tensor)])
            for name in first
        },
    )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _as_pair(value: LossValue, num_samples: int) -> tuple[float, float]:
    """Return a loss as (sum, count)."""
    if isinstance(value, tuple):
        return float(value[0]), float(value[1])
    return float(value) * num_samples, float(num_samples)


def _total_of(value: LossValue) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _joins(values: tuple[float, ...], tolerance: float) -> bool:
    """Tell whether the first is the sum of the others; so it is taken to be if it is not finite.

    A number that is not finite in the whole says nothing of the split, and ends the step anyway.
    """
    whole, *parts = values
    if not math.isfinite(whole):
        return True
    return abs(whole - sum(parts)) <= tolerance * sum(abs(part) for part in parts)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states

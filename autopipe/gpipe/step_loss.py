"""Compute a mini-batch's loss one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Payload
from autopipe.gpipe.micro_batch import as_batch, as_payload, scatter
from autopipe.loss import Loss, SplitProbe, head_of

_PROBED_STEPS = 1024
"""Steps among which every eighth is probed: a module knows of no epochs."""


class StepLoss:
    """Return each micro-batch's value to back-propagate, and sum up the mean.

    A mean is weighted by its micro-batch's share of the samples. The sum of a (sum, count) is
    divided by the number of samples, too: the counts of later micro-batches are not known yet.
    `scaled` corrects the gradients at the end.

    Args:
        number: of the step, for the `SplitProbe` of a loss that is not known to join from parts.
            None probes nothing.
    Raises:
        ValueError: the target's tensors have another number of samples than the input.
    """

    def __init__(
        self, loss: Loss, target: Any, sizes: Sequence[int], *, number: int | None
    ) -> None:
        payload = as_payload(target, what="the target")
        shapes = [tuple(tensor.shape) for tensor in payload.tensors if tensor is not None]
        if any(shape[:1] != (sum(sizes),) for shape in shapes):
            raise ValueError(
                f"the target's tensors have shapes {shapes}; their first dimension "
                f"must be the input's {sum(sizes)} samples"
            )
        self._targets = [as_batch(piece) for piece in scatter(payload, sizes)]
        self._loss, self._sizes = loss, sizes
        # A new probe each step: kept in the module, it would make the user's function part of it.
        self._probe = None if number is None else SplitProbe(loss, num_steps_before=number)
        if self._probe is not None:
            self._probe.begin_step(in_first_epoch=(number or 0) < _PROBED_STEPS)
        self._sums: dict[int, tuple[Tensor, Tensor | float]] = {}
        self._counts_given = self._has_gradient = False
        self._corrections: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, micro_batch: int, outputs: Payload) -> Tensor:
        """Return a micro-batch's value to back-propagate; a repeated call returns the same."""
        output, target = as_batch(outputs), self._targets[micro_batch]
        if self._probe is not None:
            # Before the loss, which may write into its arguments.
            self._probe.watch(output, target)
        value = self._loss(output, target)
        self._has_gradient |= head_of(value).requires_grad
        size, num_samples = self._sizes[micro_batch], max(1, sum(self._sizes))
        if isinstance(value, tuple):
            total, count = value
            self._counts_given = True
            self._sums[micro_batch] = (_wide(total), count)
            return total / num_samples
        self._sums[micro_batch] = (_wide(value) * size, float(size))
        return value * (size / num_samples)

    def forget_targets(self) -> None:
        """Free the targets, after the last micro-batch's loss."""
        self._targets = []

    def check_split(self) -> None:
        """Raise ValueError if the loss depends on the split; call it after the last loss."""
        if self._probe is not None and self._probe.finds_difference():
            self._probe.refuse()

    def check_gradient(self) -> None:
        """Raise ValueError if no loss has had a gradient; call it after the last loss."""
        if not self._has_gradient:
            raise ValueError(
                f"the loss {self._loss.name!r} has no gradient by the model's output, and nothing "
                "would train; do not detach it"
            )

    def mean(self) -> Tensor:
        """Return the mean loss: 0 if sum and count are 0, NaN if only the count is."""
        total = torch.stack([total for total, _ in self._sums.values()]).sum()
        count = self._count(total)
        # No `if`: reading the count from a GPU would make the host wait.
        mean = total / count.where(count != 0, 1)
        return mean.where((count != 0) | (total == 0), torch.nan)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Turn a gradient of the back-propagated values into the mean's gradient."""
        if not self._counts_given:
            return gradient
        # Cached, because the count may have to be copied from the last device.
        key = gradient.device, gradient.dtype
        if key not in self._corrections:
            count = self._count(gradient)
            correction = sum(self._sizes) / count.where(count != 0, 1)
            self._corrections[key] = correction.where(count != 0, 1)
        return gradient * self._corrections[key]

    def _count(self, like: Tensor) -> Tensor:
        counts: Any = sum(count for _, count in self._sums.values())
        dtype = _wide_dtype(like)
        if isinstance(counts, Tensor):
            return counts.to(like.device, dtype, non_blocking=True)
        return torch.full((), counts, dtype=dtype, device=like.device)


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(_wide_dtype(value))


def _wide_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype to sum in: half-precision sums would stall or overflow."""
    return torch.promote_types(value.dtype, torch.float32)

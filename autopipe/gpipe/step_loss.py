"""Compute a mini-batch's loss one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Payload
from autopipe.gpipe.micro_batch import as_batch, as_payload, scatter
from autopipe.loss import BatchMean, Loss, SplitProbe, head_of, mean_and_correction

_PROBED_STEPS = 1024
"""Steps among which every eighth is probed: a module knows of no epochs."""


class StepLoss:
    """Return each micro-batch's value to back-propagate, and join the mean as `BatchMean` does.

    `scaled` corrects the gradients at the end. A step with a number is probed by `SplitProbe`.
    A ValueError if the target has another number of samples than the input.
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
        self._loss, self._sizes, self._num_samples = loss, sizes, max(1, sum(sizes))
        # A new probe each step: kept in the module, it would make the user's function part of it.
        self._probe = None if number is None else SplitProbe(loss, num_steps_before=number)
        if self._probe is not None:
            self._probe.begin_step(in_first_epoch=(number or 0) < _PROBED_STEPS)
        self._parts: dict[int, BatchMean] = {}
        self._has_gradient, self._dtype = False, torch.float32
        self._corrections: dict[torch.device, Tensor | float | None] = {}

    def __call__(self, micro_batch: int, outputs: Payload) -> Tensor:
        """Return a micro-batch's value to back-propagate; a repeated call returns the same."""
        output, target = as_batch(outputs), self._targets[micro_batch]
        if self._probe is not None:
            # Before the loss, which may write into its arguments.
            self._probe.watch(output, target)
        value = self._loss(output, target)
        head = head_of(value)
        self._has_gradient |= head.requires_grad
        self._dtype = torch.promote_types(head.dtype, torch.float32)
        part = self._parts[micro_batch] = BatchMean(self._num_samples)
        return part.add(value, self._sizes[micro_batch])

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
        """Return the mean loss: 0 if sum and count are 0, not finite if only the count is."""
        total, count = self._sums()
        mean, _ = mean_and_correction(total, count, self._num_samples)
        return torch.as_tensor(mean, dtype=self._dtype, device=total.device)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Turn a gradient of the back-propagated values into the mean's gradient."""
        # Cached, because the count may have to be copied from the last device.
        if gradient.device not in self._corrections:
            _, correction = mean_and_correction(*self._sums(), self._num_samples)
            if isinstance(correction, Tensor):
                correction = correction.to(gradient.device, non_blocking=True)
            self._corrections[gradient.device] = correction
        correction = self._corrections[gradient.device]
        if correction is None:
            return gradient
        # Both may be 0-dim, and the correction is float64.
        return (gradient * correction).to(gradient.dtype)

    def _sums(self) -> tuple[Tensor, Tensor | float]:
        totals, counts = zip(*(part.sums() for part in self._parts.values()), strict=True)
        return torch.stack(totals).sum(), sum(counts)

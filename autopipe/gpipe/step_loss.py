"""Compute a mini-batch's loss one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.engine import Payload
from autopipe.gpipe.micro_batch import as_batch, as_payload, scatter
from autopipe.gpipe.partition_work import LossFunction


class StepLoss:
    """Give each micro-batch the value to back-propagate, and add up the mean.

    A mean is weighted by its micro-batch's share of the samples. Of a (sum, count) the sum is
    back-propagated; as the counts of later micro-batches are not known then, the gradients are
    divided by the total at the end.
    """

    def __init__(self, loss_fn: LossFunction, target: Any, sizes: Sequence[int]) -> None:
        payload = as_payload(target, what="the target")
        shapes = [tuple(tensor.shape) for tensor in payload.tensors if tensor is not None]
        if any(shape[:1] != (sum(sizes),) for shape in shapes):
            raise ValueError(
                f"the target's tensors have shapes {shapes}; their first dimension "
                f"must be the input's {sum(sizes)} samples"
            )
        self._targets = [as_batch(piece) for piece in scatter(payload, sizes)]
        self._loss_fn, self._sizes = loss_fn, sizes
        self._sums: dict[int, tuple[Tensor, Tensor | float]] = {}
        self._counts_given = False
        self._totals: dict[torch.device, Any] = {}

    def __call__(self, micro_batch: int, outputs: Payload) -> Tensor:
        """Return what to back-propagate for a micro-batch; asked again, the same."""
        loss = self._loss_fn(as_batch(outputs), self._targets[micro_batch])
        size = self._sizes[micro_batch]
        if isinstance(loss, tuple):
            total, count = loss
            self._counts_given = True
            self._sums[micro_batch] = (total.detach(), count)
            return total
        if loss.ndim != 0:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; return a 0-dim mean, or (sum, count)"
            )
        self._sums[micro_batch] = (loss.detach() * size, float(size))
        return loss * (size / max(1, sum(self._sizes)))

    def forget_targets(self) -> None:
        """Let go of the targets, once all micro-batches have had their loss."""
        self._targets = []

    def mean(self) -> Tensor:
        totals = torch.stack([total for total, _ in self._sums.values()])
        total = totals.sum()
        return total / self._count(total.device)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Turn the gradient of what was back-propagated into the mean's."""
        return gradient / self._count(gradient.device) if self._counts_given else gradient

    def _count(self, device: torch.device) -> Any:
        # Once a device, not once a parameter; a count may be a tensor of the last device.
        if device not in self._totals:
            total = sum(count for _, count in self._sums.values())
            if isinstance(total, Tensor):
                total = total.to(device, non_blocking=True)
            self._totals[device] = total
        return self._totals[device]

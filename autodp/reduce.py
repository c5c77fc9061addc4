"""Sum the replicas' gradients while the last backward still runs.

Why not DistributedDataParallel: it wraps a module, re-arranges its buckets after the first
backward (so a resumed run sums in another order), needs a forward on every replica, and must be
told through private calls which micro-batch is the last. What a pipeline stage needs is smaller:
fixed buckets, armed for one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class _Bucket:
    """Hold parameters whose gradients travel as one message, and one presence flag for each.

    A parameter no sample used has no gradient on any replica, and must have none afterwards, or
    the optimizer would decay it; the flags, summed with the gradients, tell it from one that only
    this replica did not use.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    flags: Tensor
    missing: int = 0
    work: dist.Work | None = None


class GradientReducer:
    """Replace each parameter's gradient by its sum over the replicas of a stage.

    Args:
        parameters: the stage's trainable parameters in forward order; the same on every replica.
        group: the replicas of the stage.
        bucket_bytes: gradients are sent in messages of about this size.
    Source: the bucketing and overlap of Li et al., "PyTorch Distributed" (VLDB 2020), section 3.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *,
                 bucket_bytes: int = 25 << 20) -> None:
        self._group = group
        self._buckets = _fill_buckets(parameters, bucket_bytes)
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in parameters]
        self._armed = False
        self._next = 0

    def arm(self) -> None:
        """Start sending each bucket as soon as the coming backward has filled it."""
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.work = None
        self._next = 0
        self._armed = True

    def finish(self) -> None:
        """Send what is left, wait, and put the summed gradients in place.

        A replica without samples calls it without arm(): it contributes zeros.
        """
        if not self._armed:
            self.arm()
        self._armed = False
        while self._next < len(self._buckets):
            self._send_next()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            self._put_back(bucket)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._buckets.clear()
        self._bucket_of.clear()

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._bucket_of[parameter].missing -= 1  # type: ignore[index]
        # Replicas must issue messages in the same order: a full bucket waits for those before it.
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        # The flags are filled in place: a copy from the host would stall a GPU's backward.
        bucket.flags.fill_(1)
        for i, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                bucket.flags[i] = 0
            else:
                view.copy_(parameter.grad)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _put_back(self, bucket: _Bucket) -> None:
        all_here = all(parameter.grad is not None for parameter in bucket.parameters)
        used = [True] * len(bucket.parameters) if all_here else (bucket.flags > 0).tolist()
        for parameter, view, in_use in zip(bucket.parameters, bucket.views, used, strict=True):
            parameter.grad = view if in_use else None


def _fill_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Pack parameters from the last to the first, the order in which a backward finishes them."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        same = bool(groups) and groups[-1][0].dtype == parameter.dtype
        if not same or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room -= size
    return [_make_bucket(group) for group in groups]


def _make_bucket(parameters: list[nn.Parameter]) -> _Bucket:
    total = sum(p.numel() for p in parameters) + len(parameters)
    flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
    views, offset = [], 0
    for parameter in parameters:
        views.append(flat[offset:offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
    return _Bucket(parameters, flat, views, flags=flat[offset:])

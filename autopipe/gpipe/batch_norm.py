"""Let BatchNorm track mini-batches although it sees micro-batches, each once or twice.

With 3 micro-batches a plain BatchNorm updates its running statistics three times, and again when a
forward is repeated (r). A deferred one gathers statistics, and updates once:

    forward     0        1        2                    r1        r0
    plain       update   update   update               update    update
    deferred    gather   gather   gather and update    -         -
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from autopipe.engine import ForwardPass, current_forward_pass


@dataclass(frozen=True)
class Moments:
    """Hold the values per channel, their (C,) means, and (C,) sums of squared deviations."""

    count: int
    mean: Tensor
    squares: Tensor

    def merged(self, other: Moments) -> Moments:
        # Chan, Golub and LeVeque, 1979: precise even if the mean is large.
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        between = delta.square() * (self.count * other.count / count)
        return Moments(count, mean, self.squares + other.squares + between)


class DeferredBatchNorm(_BatchNorm):
    """Normalise each micro-batch by itself, but track the statistics of whole mini-batches.

    After a mini-batch, running_mean, running_var and num_batches_tracked are those of a plain
    BatchNorm that saw it at once. The output is not: in training each micro-batch is normalised by
    its own mean and variance, since the others' are not known yet. So torch refuses a micro-batch
    with one value per channel. Outside a pipeline, in evaluation and with `track_running_stats`
    off it is a plain BatchNorm.

    Source: torchgpipe's manual, 2.1.3. Ours also commits mini-batches of fewer micro-batches than
    asked for, and takes the statistics from the normalisation itself.
    """

    # Moments gathered so far, one entry for each call of this layer within a forward. These are
    # class attributes, because a converted layer never runs an __init__ of ours.
    _gathered: tuple[Moments, ...] = ()
    _latest: ForwardPass | None = None
    _num_calls: int = 0

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a micro-batch (B, C, ...); gather its statistics unless it is a repetition."""
        current, like = current_forward_pass(), self.running_mean
        if current is None or like is None or not (self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        # With momentum 1 the kernel writes the micro-batch's own statistics into these.
        mean, variance = torch.zeros_like(like), torch.zeros_like(like)
        output = F.batch_norm(
            input, mean, variance, self.weight, self.bias, training=True, momentum=1, eps=self.eps
        )
        if not current.recomputing:
            with torch.no_grad():
                # Statistics of half-precision layers would be rounded: compute them again.
                if mean.dtype in (torch.float16, torch.bfloat16):
                    others = [dim for dim in range(input.dim()) if dim != 1]
                    variance, mean = torch.var_mean(input.float(), others)
                count = input.numel() // input.shape[1]
                self._gather(current, Moments(count, mean, variance * (count - 1)))
        return output

    def _gather(self, current: ForwardPass, moments: Moments) -> None:
        if current is not self._latest:
            # A lower micro-batch begins a mini-batch; one that failed midway is forgotten.
            if self._latest is None or current.micro_batch <= self._latest.micro_batch:
                self._gathered = ()
            self._latest, self._num_calls = current, 0
        call, self._num_calls = self._num_calls, self._num_calls + 1
        if call < len(self._gathered):
            moments = self._gathered[call].merged(moments)
        if current.micro_batch == current.num_micro_batches - 1:
            self._commit(moments)
        self._gathered = (*self._gathered[:call], moments, *self._gathered[call + 1 :])

    def _commit(self, moments: Moments) -> None:
        running_mean, running_var = self.running_mean, self.running_var
        assert running_mean is not None and running_var is not None
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        variance = moments.squares / (moments.count - 1)
        for running, new in ((running_mean, moments.mean), (running_var, variance)):
            running.copy_(new * factor + running.to(new.dtype) * (1.0 - factor))


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """Defer nn.BatchNorm1d; see DeferredBatchNorm."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """Defer nn.BatchNorm2d; see DeferredBatchNorm."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """Defer nn.BatchNorm3d; see DeferredBatchNorm."""


_DEFERRED: dict[type[Any], type[_BatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}
_PLAIN: dict[type[Any], type[Any]] = {deferred: plain for plain, deferred in _DEFERRED.items()}
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Make every BatchNorm of a module track mini-batches, in place; return the module.

    Only the objects' class changes; each remains an nn.BatchNorm1d, 2d or 3d. Layers without
    running statistics stay as they are. So do nn.SyncBatchNorm and unknown subclasses; a warning
    names them, as they go on tracking micro-batches.

    Raises:
        ValueError: a lazy BatchNorm does not know its width yet; nothing is converted.
    """
    norms = [(n or "the module", m) for n, m in module.named_modules() if _is_tracking(m)]
    for name, norm in norms:
        if isinstance(norm, _LAZY):
            raise ValueError(
                f"{name} is a {type(norm).__name__} that has not seen an input; "
                f"run a forward before it is converted"
            )
    for name, norm in norms:
        if type(norm) in _DEFERRED:
            norm.__class__ = _DEFERRED[type(norm)]
        elif not isinstance(norm, DeferredBatchNorm):
            warnings.warn(
                f"{name} is a {type(norm).__name__}, which cannot be deferred: "
                f"its running statistics follow micro-batches instead of mini-batches",
                RuntimeWarning,
                stacklevel=2,
            )
    return module


def _is_tracking(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and module.track_running_stats


def restore_batch_norm(module: nn.Module) -> nn.Module:
    """Make every deferred BatchNorm of a module a plain one again, in place; return the module."""
    for child in module.modules():
        if type(child) in _PLAIN:
            for name in ("_gathered", "_latest", "_num_calls"):
                vars(child).pop(name, None)
            child.__class__ = _PLAIN[type(child)]
    return module


@contextmanager
def running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Keep a repeated forward inside from updating running statistics a second time."""
    # In training mode BatchNorm normalises by the batch with or without track_running_stats, so
    # that the output stays the same to the bit. Deferred ones notice repetitions themselves.
    tracking = [
        child
        for child in module.modules()
        if _is_tracking(child) and child.training and not isinstance(child, DeferredBatchNorm)
    ]
    for child in tracking:
        child.track_running_stats = False
    try:
        yield
    finally:
        for child in tracking:
            child.track_running_stats = True

"""Find out whether an unknown loss joins from parts to the whole.

    epoch      0                                1         2
    step       0 1 2 3 4 5 6 7 8 ... 16 ... 24  25 26 ... 50 51 ...
    probed     * * * * * * * * *     *      *   *         *

Values and gradients by the output are compared. The first steps reveal most losses. The others of
the first epoch reveal what few samples show, such as ignored targets: by its end all samples have
had their turn. From then on only what changes with the epoch is looked for.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from autopipe.loss.batch_mean import mean_of, sum_and_count
from autopipe.loss.loss_functions import Loss, head_of
from autopipe.random_state import random_state

_LOGGER = logging.getLogger(__name__)

_FIRST_STEPS = 8
_PERIOD_STEPS = 8

_MOST_ELEMENTS = 1 << 22
"""Output elements kept for a probe: 16 MiB of float32."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 2e-3}
"""Relative; float32 allows for TF32 inside the loss, half precision for its own rounding."""
_COARSEST = 1.6e-2

_Part = tuple[Any, Any]
"""Outputs and targets of some samples."""


@final
@dataclass(frozen=True)
class _Answer:
    """Hold a part's loss as (sum, count), and the sum's gradient by the part's output."""

    size: int
    dtype: torch.dtype
    total: float
    count: float
    gradient: Tensor | None


@final
class SplitProbe:
    """Compare the loss of several samples with the loss joined from their parts.

    The parts are a step's micro-batches, up to `_MOST_ELEMENTS`, or two parts of a single
    micro-batch. The loss is called on copies, and torch's random state is restored; a loss that
    counts its calls counts these, too. An exact `Loss` is not probed.

    Args:
        num_steps_before: steps of the same loss before this probe's first one.
    """

    def __init__(self, loss_fn: Loss, *, num_steps_before: int = 0) -> None:
        self._loss_fn = loss_fn
        self._step = num_steps_before - 1
        self._is_due = False
        self._parts: list[_Part] = []
        self._is_random = False
        self._difference = ""

    def begin_step(self, *, in_first_epoch: bool = True, starts_epoch: bool = False) -> None:
        """Count a step, and forget the parts of the step before."""
        self._step += 1
        comes_round = in_first_epoch and self._step % _PERIOD_STEPS == 0
        self._is_due = starts_epoch or comes_round or self._step < _FIRST_STEPS
        self._parts = []

    @property
    def is_watching(self) -> bool:
        """Return whether this step's losses are compared."""
        return self._is_due and not (self._loss_fn.is_exact or self._is_random)

    def watch(self, output: Any, target: Any) -> None:
        """Keep a micro-batch's output and target for the probe, before the loss is computed."""
        if not self.is_watching:
            return
        part = (tree_map(Tensor.detach, output), target)
        # Only tensors whose first dimension is the sample can be split.
        if any(not tensor.ndim or len(tensor) != _size(part) for tensor in tree_leaves(output)):
            return
        if self._parts and _sample_shapes(part) != _sample_shapes(self._parts[0]):
            return
        of_a_sample = max(1, sum(one.numel() for one in tree_leaves(output)) // _size(part))
        num_kept = sum(map(_size, self._parts))
        num_rows = max(_MOST_ELEMENTS // of_a_sample, 2) - num_kept
        if num_rows > 0:
            self._parts.append(_rows(part, 0, num_rows))

    def finds_difference(self) -> bool:
        """Compare the parts that were kept; call it after the step's last loss."""
        parts, self._parts = _at_least_two(self._parts), []
        if len(parts) < 2:
            return False
        parts = [tree_map(lambda *of_parts: torch.cat(of_parts), *parts), *parts]
        try:
            # In float32, because half precision could hide a difference of a percent.
            wide = tree_map(_widened, parts)
            answers, dtype = self._answers(wide), _first(wide[0]).dtype
        except RuntimeError:  # Such as a weight in half precision.
            answers, dtype = self._answers(parts), _first(parts[0]).dtype
        if self._is_random:
            _LOGGER.warning(
                "the loss %r draws random numbers: whether it depends on how a batch is split "
                "cannot be found out",
                self._loss_fn.name,
            )
            return False
        self._difference = _describe_difference(answers, dtype)
        if not self._difference and _gradients_differ(answers, dtype):
            self._difference = ": its value joins, but its gradient by the output does not"
        return bool(self._difference)

    def refuse(self) -> NoReturn:
        """Raise a ValueError for a loss that this or another rank's probe found to differ."""
        raise ValueError(
            f"the loss {self._loss_fn.name!r} depends on how a batch is split into micro-batches "
            f"and replicas{self._difference}. Where targets are weighted or ignored, return "
            "(sum, count): the sum of the losses, and the number or weight of the targets that "
            "count; torch's own modules and functions, such as nn.CrossEntropyLoss(weight=...), "
            "are joined so if they are given as they are. A function that is known to be right "
            "can be given as pipetransformer.Loss(function, is_exact=True)"
        )

    def _answers(self, parts: list[_Part]) -> list[_Answer]:
        """Call the loss on each part; note whether it draws random numbers."""
        device = _first(parts[0]).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            before = random_state(device)
            answers = [self._answer(*part) for part in parts]
            self._is_random = random_state(device) != before
        return answers

    def _answer(self, output: Any, target: Any) -> _Answer:
        size = _size((output, target))
        output = tree_map(lambda one: one.clone().requires_grad_(one.is_floating_point()), output)
        # Clones, because a loss may not work in place on leaves.
        value = self._loss_fn(tree_map(torch.clone, output), target)
        total, gradient = head_of(value), None
        if leaves := [leaf for leaf in tree_leaves(output) if leaf.requires_grad]:
            # Without a gradient, as when all targets are ignored, it is zero.
            gradients = [torch.zeros_like(leaf) for leaf in leaves]
            if total.requires_grad:
                gradients = list(torch.autograd.grad(total, leaves, materialize_grads=True))
            gradient = torch.cat([one.reshape(size, -1) for one in gradients], dim=1)
            if not isinstance(value, tuple):
                # A mean's gradient, times the samples, is that of the sum.
                gradient = gradient * size
        added, count = sum_and_count(value, size)
        return _Answer(size, total.dtype, float(added), float(count), gradient)


def refuse_split(loss_fn: Loss, output: Tensor, target: Any) -> None:
    """Raise a ValueError if a loss of these samples depends on how they are split."""
    probe = SplitProbe(loss_fn)
    probe.begin_step()
    probe.watch(output, target)
    if probe.finds_difference():
        probe.refuse()


def _at_least_two(parts: list[_Part]) -> list[_Part]:
    """Cut the only part in two, if it has two samples."""
    if len(parts) != 1:
        return parts
    size = _size(parts[0])
    # Unequal parts reveal more; a part of one sample only if there are no more than three.
    cut = max(size // 3, min(2, size // 2))
    return [_rows(parts[0], 0, cut), _rows(parts[0], cut, size)] if cut else parts


def _describe_difference(answers: list[_Answer], dtype: torch.dtype) -> str:
    """Describe how the whole's loss (the first) differs from its parts' joined loss, or ""."""
    totals, counts = [one.total for one in answers], [one.count for one in answers]
    tolerance = max(_TOLERANCES.get(one, _COARSEST) for one in (dtype, answers[0].dtype))
    if _joins(totals, tolerance) and _joins(counts, tolerance):
        return ""
    whole, joined = mean_of(totals[0], counts[0]), mean_of(sum(totals[1:]), sum(counts[1:]))
    return (
        f": it is {whole:.6g} over {answers[0].size} samples, but {joined:.6g} when joined from "
        f"parts of {', '.join(str(one.size) for one in answers[1:])}"
    )


def _gradients_differ(answers: list[_Answer], dtype: torch.dtype) -> bool:
    gradients = [one.gradient for one in answers if one.gradient is not None]
    if len(gradients) < len(answers):
        return bool(gradients)
    whole, joined = gradients[0].double(), torch.cat(gradients[1:]).double()
    if not bool(whole.isfinite().all()):
        return False
    tolerance = max(_TOLERANCES.get(one, _COARSEST) for one in (gradients[0].dtype, dtype))
    return not float((whole - joined).abs().max()) <= tolerance * float(whole.abs().max())


def _first(part: _Part) -> Tensor:
    first: Tensor = tree_leaves(part[0])[0]
    return first


def _size(part: _Part) -> int:
    return len(_first(part))


def _rows(part: _Part, first: int, last: int) -> _Part:
    # Cloned, because a loss may write into its arguments.
    rows: _Part = tree_map(lambda tensor: tensor[first:last].clone(), part)
    return rows


def _sample_shapes(part: _Part) -> Any:
    return tree_map(lambda tensor: tensor.shape[1:], part)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _joins(values: list[float], tolerance: float) -> bool:
    """Return whether the first value is the sum of the others, within a relative tolerance."""
    whole, *parts = values
    if not math.isfinite(whole):  # Says nothing about the split, and ends the step anyway.
        return True
    return abs(whole - sum(parts)) <= tolerance * sum(abs(part) for part in parts)

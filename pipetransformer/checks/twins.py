"""Copy a model to compare it with itself: in float64 where it can, without dropout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from autopipe.loss import LossFunction, LossValue
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, named_tensors, output_of, unwrapped

_CHANCES = ("p", "prob", "drop_prob", "drop_rate", "dropout_prob", "dropout_rate", "rate")
"""Names under which modules that only drop keep their probability."""
_DROPOUT = "drop"
"""What the names have in common under which other modules keep theirs."""


def make_twin(model: LayeredModel, dtype: torch.dtype) -> LayeredModel:
    """Return an independent copy that has a dtype, and drops nothing."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(
            f"this {type(model.model).__name__} cannot be copied, and so not be verified: {error}"
        ) from error
    for name, tensor in named_tensors(model.model).items():
        # deepcopy loses a parameter's attributes, at which an optimizer may look.
        vars(twin.tensor(name)).update(vars(tensor))
    twin.convert(dtype)
    for module, name, _ in list(_chances(twin)):
        setattr(module, name, 0.0)
    return twin


@contextmanager
def without_dropout(model: LayeredModel) -> Iterator[None]:
    """Have a model drop nothing within the block."""
    chances = list(_chances(model))
    try:
        for module, name, _ in chances:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, chance in chances:
            setattr(module, name, chance)


def _chances(model: LayeredModel) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield what drops, and with which probability under which attribute."""
    # A sublayer's module may be none of the model's own.
    roots = [model.model, *(sublayer.module for sublayer in model.sublayers)]
    for module in dict.fromkeys(chain.from_iterable(root.modules() for root in roots)):
        only_drops = "drop" in type(module).__name__.lower()
        for name, chance in vars(module).items():
            is_chance = name in _CHANCES if only_drops else _DROPOUT in name
            if is_chance and isinstance(chance, float) and 0 < chance < 1:
                yield module, name, chance


def converted(batch: Mapping[str, Tensor], dtype: torch.dtype) -> Batch:
    """Return a batch whose floating entries have a dtype; ids stay integers."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


@dataclass(frozen=True)
class OwnForward:
    """Call a model's own forward, and its loss, as a user would.

    Args:
        loss_fn: None is the loss that the model itself returns, or else its adapter's.
    """

    model: LayeredModel
    loss_fn: LossFunction | None

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (output, mean loss)."""
        model = self.model
        sides = model.sides_of(0, len(model.sublayers))
        keywords = {n: batch[n] for n in (*model.inputs, *sides) if n in batch}
        # A recorded model's inputs have its forward's names; others' go in by position.
        first = () if model.is_recorded else (keywords.pop(model.inputs[0]),)
        kinds = type(unwrapped(model.model)).__mro__
        is_of_transformers = any(kind.__module__.startswith("transformers.") for kind in kinds)
        answers_loss = self.loss_fn is None and is_of_transformers
        labels = {name: batch[name] for name in model.targets} if answers_loss else {}
        answer = model.model(*first, **{**keywords, **labels})
        # With labels some make their loss of no logits, as Liger's forwards do.
        has_output = not labels or getattr(answer, "logits", answer) is not None
        output = output_of(answer if has_output else model.model(*first, **keywords))
        if answers_loss and answer.loss is not None:
            return output, answer.loss
        loss_fn = self.loss_fn or model.loss_fn
        assert loss_fn is not None, "choose_loss has found one"
        return output, mean_loss(loss_fn(output, model.targets_of(batch)))


def mean_loss(value: LossValue) -> Tensor:
    """Return a loss's mean."""
    return value[0] / value[1] if isinstance(value, tuple) else value


_ALLOWED = {torch.float64: (1e-9, 1e-7), torch.float32: (1e-6, 1e-4)}
"""Absolute and relative differences. In float64 rounding is far below both. In float32 the split
of a batch alone moves sums by some 1e-6 of their terms."""
_COARSEST = (1e-4, 3e-2)
"""The same in low precision."""


def find_gap(one: Tensor, other: Tensor, dtype: torch.dtype, *, scale: float = 0.0) -> str:
    """Say how two tensors differ: in shape, by more than rounding, or by a NaN; "" if not.

    Args:
        dtype: the coarsest that was computed in.
        scale: of what the tensors are a part; the relative limit goes by it, or by their largest.
    """
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    if one.numel() == 0:
        return ""
    absolute, relative = _ALLOWED.get(dtype, _COARSEST)
    pairs = [_largest(*pair) for pair in zip(_pieces(one), _pieces(other), strict=True)]
    # torch's maximum, as Python's loses a NaN.
    largest, difference = (float(torch.tensor(each).max()) for each in zip(*pairs, strict=True))
    # A NaN fails this comparison, and so is a difference.
    if difference <= absolute + relative * max(largest, scale):
        return ""
    return f"by {difference:.3g} where the largest is {largest:.3g}"


def _largest(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the largest finite number of the second, and the largest difference."""
    ours, theirs = one.double(), other.double()
    # Infinities, as a buffer of extremes begins with, are equal, but their difference is a NaN.
    difference = float((ours - theirs).where(ours != theirs, 0).abs().max())
    return float(theirs.where(theirs.isfinite(), 0).abs().max()), difference


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor's parts, as several copies in float64 of a whole one take much memory."""
    return tensor.detach().reshape(-1).split(_PIECE)


_PIECE = 1 << 16
"""Numbers that are compared at a time."""

_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Relative to the largest number; on a GPU a sum in another order moves more than on a CPU."""
_LOW = 5e-2
"""The same where layers compute in low precision, whatever the dtype of what they return."""


def differ(one: Tensor, other: Tensor, computes_in: torch.dtype | None) -> bool:
    """Return whether two tensors differ by more than the order of sums.

    Args:
        computes_in: the dtype of autocast; None computes in the tensors'.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.is_complex():
        return differ(torch.view_as_real(one), torch.view_as_real(other), computes_in)
    if not one.is_floating_point():
        return not torch.equal(one, other)
    if one.numel() == 0:
        return False
    pairs = [*zip(_pieces(one), _pieces(other), strict=True)]
    if not all(torch.equal(mine.isfinite(), its.isfinite()) for mine, its in pairs):
        return True
    largest = max(float(its.nan_to_num(0, 0, 0).abs().max()) for _, its in pairs)
    difference = max(float((mine - its).nan_to_num(0, 0, 0).abs().max()) for mine, its in pairs)
    return difference > _TOLERANCES.get(computes_in or one.dtype, _LOW) * largest

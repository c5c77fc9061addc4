"""Verify a model: rank 0 by itself first, then all ranks together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.loss import LossFunction
from pipetransformer.checks.tolerance import Tolerance
from pipetransformer.checks.verification_sides import (
    OwnForward,
    compare_steps,
    converted,
    find_difference,
    make_twin,
)
from pipetransformer.errors import VerificationError
from pipetransformer.feed import Batch
from pipetransformer.model import LayeredModel, Task
from pipetransformer.processes import World, told_by_rank_0

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verification:
    """Report a model that trains as its own forward does in a plain loop.

    Args:
        dtype: in which that was found: "float64", or "float32" where the model computes parts in
            no other, and rounding hides what is smaller.
        num_tensors: parameters and buffers that were compared.
    """

    dtype: str
    num_samples: int
    num_tensors: int


def verify(
    task: Task, world: World, *, model: LayeredModel, loss_fn: LossFunction | None, batch: Batch
) -> Verification:
    """Compare a model's layers, loss and pipelines with its own forward. Collective.

    Args:
        model: complete on rank 0.
        loss_fn: the user's own; None is the model's.
        batch: two samples or more, in host memory.
    """
    num_samples = min(len(entry) for entry in batch.values())
    if num_samples < 2:
        raise ValueError(f"a batch of {num_samples} samples cannot be split; give two or more")
    name, outcome = told_by_rank_0(
        lambda: _verify_locally(task, model, loss_fn, batch), group=world.group
    )
    if not outcome:
        dtype: torch.dtype = getattr(torch, name)
        own = OwnForward(make_twin(model, dtype), loss_fn) if world.is_main else None
        twin = replace(
            task,
            model=make_twin(model, dtype),
            config=replace(
                task.config,
                max_grad_norm=None,
                cache=False,
                on_nonfinite="raise",
                micro_batch_size=None,
                collate_fn=None,  # The batch is collated.
                num_workers=0,
                precision=None,
            ),
        )
        outcome = compare_steps(
            twin, world, own=own, batch=converted(batch, dtype), tolerance=Tolerance.of(dtype)
        )
    if outcome:
        raise VerificationError(outcome)
    num_tensors = sum(len(model.tensors(index)) for index in range(len(model.sublayers)))
    return Verification(name, num_samples, num_tensors)


def _verify_locally(
    task: Task, model: LayeredModel, loss_fn: LossFunction | None, batch: Batch
) -> list[str]:
    """Return the dtype that the model computes in, and what differs."""
    try:
        dtype = _dtype_of(model, loss_fn, batch)
        own = OwnForward(make_twin(model, dtype), loss_fn)
        own.model.model.train()
        found = find_difference(own, task.loss_fn, converted(batch, dtype), Tolerance.of(dtype))
    except Exception as error:
        # The other ranks wait for an answer.
        _LOGGER.exception("the model's own forward could not be called")
        return ["", f"the model's own forward could not be called: {error!r}"]
    return [str(dtype).removeprefix("torch."), found]


def _dtype_of(model: LayeredModel, loss_fn: LossFunction | None, batch: Batch) -> torch.dtype:
    """Return float64 where the model's forward takes it and goes through with it, else float32."""
    own = OwnForward(make_twin(model, torch.float64), loss_fn)
    try:
        with torch.no_grad(), _Narrowing() as narrowing:
            own(converted(batch, torch.float64))
    except RuntimeError as error:
        _LOGGER.warning("the model does not compute in float64 (%s): float32 is compared", error)
        return torch.float32
    return torch.float32 if narrowing.is_found else torch.float64


class _Narrowing(TorchDispatchMode):
    """Notice float64 that becomes another floating dtype, as where positions are rotated."""

    is_found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.is_found = self.is_found or output.dtype != torch.float64
        return output

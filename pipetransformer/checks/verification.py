"""Verify a model: rank 0 compares its layers with its own forward, then all ranks take steps.

Rank 0 looks for these, in this order, as each would show in the next:
a forward that writes into its own tensors; one that draws random numbers; sublayers that are not
the model's forward; a sublayer, or a loss, that depends on how a batch is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.loss import Loss, LossFunction, refuse_split
from autopipe.profile import left_as_found
from pipetransformer.checks.twins import (
    OwnForward,
    converted,
    find_gap,
    make_twin,
    mean_loss,
    without_dropout,
)
from pipetransformer.checks.verified_steps import compare_steps
from pipetransformer.errors import VerificationError
from pipetransformer.feed import Batch, find_changed, part_of
from pipetransformer.model import WAYS_OUT, LayeredModel, Task, named_tensors, whole_in_mode
from pipetransformer.processes import World, told_by_rank_0

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Verification:
    """Report a model that trains as its own forward does in a plain loop.

    Args:
        dtype: of the comparison: "float64", or "float32" where the model computes a part in
            float32 only. Rounding then hides smaller differences.
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
    computed, compared, outcome = told_by_rank_0(
        lambda: _verify_locally(task, model, loss_fn, batch), group=world.group
    )
    if not outcome:
        dtype: torch.dtype = getattr(torch, computed)
        limits: torch.dtype = getattr(torch, compared)
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
                # Graphs of a twin in float64 would take long, and are not those of the run.
                compile=False,
                compile_backend="inductor",
                compile_mode=None,
            ),
        )
        try:
            outcome = compare_steps(
                twin, world, own=own, batch=converted(batch, dtype), dtype=limits
            )
        except RuntimeError as error:
            if world.size > 1:  # Other ranks wait elsewhere.
                raise
            outcome = f"it cannot be trained in parts: {error}"
    if outcome:
        raise VerificationError(outcome)
    num_tensors = sum(len(model.tensors(index)) for index in range(len(model.sublayers)))
    return Verification(compared, num_samples, num_tensors)


def verify_recorded(
    task: Task, world: World, *, loss_fn: LossFunction | None, read: Callable[[], Batch]
) -> str:
    """Compare a model that is known by a recording alone with its own forward. Collective.

    Its outputs, its loss and every gradient are compared on two samples, on rank 0, without
    dropout. Both run the same kernels on the same weights, so they are mostly equal bit by bit:
    no copy of the model is needed. Where they are not, twins in float64 decide.

    Returns:
        how they were found equal; "" for a model that was written down by hand.
    Raises:
        ValueError: on every rank: they differ.
    """
    if not task.model.is_recorded:
        return ""

    def run() -> str:
        batch = read()
        if loss_fn is None and (by := _loss_gap(task, batch)):
            raise ValueError(
                f"the loss of this {type(task.model.model).__name__} was taken for "
                f"{task.loss_fn.name!r}, but is another, {by}: give loss_fn=. {WAYS_OUT}"
            )
        if _are_same_bits(task, batch):
            return "bit by bit"
        _, dtype, found = _verify_locally(task, task.model, loss_fn, batch)
        if found:
            raise ValueError(
                f"this {type(task.model.model).__name__} cannot be trained in parts: {found}. "
                f"{WAYS_OUT}"
            )
        return f"in {dtype}"

    return told_by_rank_0(run, group=world.group)


def _loss_gap(task: Task, batch: Batch) -> str:
    """Say how the loss that a model itself returns differs from that it was taken for, or ""."""
    model = task.model
    device = next(model.model.parameters()).device
    batch = {name: entry.to(device) for name, entry in batch.items()}
    with torch.no_grad(), whole_in_mode(model.model, training=False):
        output, own = OwnForward(model, None)(batch)
        ours = mean_loss(task.loss_fn(output, model.targets_of(batch)))
    allowed = 1e-4 if own.dtype in (torch.float32, torch.float64) else 3e-2
    one, other = float(ours), float(own)
    # Two samples without a target have no loss.
    if math.isclose(one, other, rel_tol=allowed, abs_tol=1e-6) or math.isnan(one):
        return ""
    return f"{one:.7g} instead of {other:.7g}"


def _are_same_bits(task: Task, batch: Batch) -> bool:
    """Tell whether a model's sublayers and its own forward have the same outputs and gradients.

    A forward that writes into a buffer has not: what it writes depends on how a batch is split.
    """
    model = task.model
    device = next(model.model.parameters()).device
    batch = {name: entry.to(device) for name, entry in batch.items()}
    parameters = [p for n, p in model.model.named_parameters() if n in task.trainable]
    with (
        left_as_found([model.model], device),
        whole_in_mode(model.model, training=True),
        without_dropout(model),
    ):
        before = {name: buffer.clone() for name, buffer in model.model.named_buffers()}
        # One loss for both: two ways to divide by a count may differ in the last bit.
        expected, own_loss = OwnForward(model, task.loss_fn)(batch)
        if find_changed(dict(model.model.named_buffers()), before):
            return False
        output = model.run(batch)
        loss = mean_loss(task.loss_fn(output, model.targets_of(batch)))
        theirs, ours = _gradients(own_loss, parameters), _gradients(loss, parameters)
    pairs = [(output, expected), *zip(ours, theirs, strict=True)]
    return all(_same(one, other) for one, other in pairs)


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    if not loss.requires_grad:
        return ()
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _verify_locally(
    task: Task, model: LayeredModel, loss_fn: LossFunction | None, batch: Batch
) -> list[str]:
    """Return the twins' dtype, that whose rounding is allowed for, and what differs."""
    try:
        dtype, limits = _dtypes_of(model, loss_fn, batch)
        own = OwnForward(make_twin(model, dtype), loss_fn)
        own.model.model.train()
        found = find_difference(own, task.loss_fn, converted(batch, dtype), limits)
    except Exception as error:
        # Returned, so that it becomes a VerificationError on every rank.
        _LOGGER.exception("the model's own forward could not be called")
        return ["", "", f"the model's own forward could not be called: {error!r}"]
    computed, compared = (str(one).removeprefix("torch.") for one in (dtype, limits))
    return [computed, compared, found]


def _dtypes_of(
    model: LayeredModel, loss_fn: LossFunction | None, batch: Batch
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to compute in, and the coarsest in which the model computes a part then.

    It is float64 where the model's forward goes through with it: what little is rounded to float32
    moves the sums less, and updates do not make that larger.
    """
    own = OwnForward(make_twin(model, torch.float64), loss_fn)
    try:
        with torch.enable_grad(), _Narrowing() as narrowing:
            _, loss = own(converted(batch, torch.float64))
        if loss.requires_grad:
            loss.backward()
        made = [loss, *(p.grad for p in own.model.model.parameters() if p.grad is not None)]
        # Some masks are float32's least number, which overflows where it is multiplied.
        why = "" if all(one.isfinite().all() for one in made) else "not all is finite"
    except RuntimeError as error:
        why = str(error)
    if why:
        _LOGGER.warning("the model does not compute in float64 (%s): float32 is compared", why)
        return torch.float32, torch.float32
    return torch.float64, torch.float32 if narrowing.is_found else torch.float64


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


def find_difference(own: OwnForward, loss_fn: Loss, batch: Batch, dtype: torch.dtype) -> str:
    """Return the first difference in a sentence, or ""; the twin may be altered afterwards."""
    model = own.model
    before = {name: t.detach().clone() for name, t in named_tensors(model.model).items()}
    with torch.no_grad():
        expected, outputs = _recorded(model.model, own, batch)
        if written := find_changed(named_tensors(model.model), before):
            return (
                f"the forward writes into {written!r}, and what it writes depends on how a batch "
                "is split; use a layer without running statistics"
            )
        again = own(batch)[0]
        # A NaN differs from itself, and is no sign of random numbers.
        if find_gap(again.nan_to_num(), expected[0].nan_to_num(), dtype):
            return (
                "the forward gives another output for the same batch: it draws random numbers "
                "that could not be switched off, perhaps; set its dropout to 0 before the model "
                "is verified"
            )
        return (
            _compare_forward(model, batch, expected[0], outputs, dtype)
            or _find_split(model, batch, dtype)
            or _refused_loss(own, loss_fn, batch)
        )


def _compare_forward(
    model: LayeredModel,
    batch: Batch,
    expected: Tensor,
    outputs: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> str:
    layered, ours = _recorded(model.model, model.run, batch)
    by = find_gap(layered, expected, dtype)
    if not by:
        return ""
    shared = (name for name in outputs if name in ours)
    first = next((name for name in shared if find_gap(ours[name], outputs[name], dtype)), None)
    where = f"first in the output of {first!r}" if first else "behind the last module they share"
    return (
        "the model's own forward and its sublayers in order give other outputs "
        f"({by}), {where}; give the LayeredModel sublayers that do all that the forward does"
    )


def _find_split(model: LayeredModel, batch: Batch, dtype: torch.dtype) -> str:
    """Name the first sublayer that gives a batch and its two parts different outputs, or ""."""
    num_samples = len(batch[model.inputs[0]])
    cuts = (slice(0, num_samples // 2), slice(num_samples // 2, num_samples))
    value: Tensor | Batch = batch
    for index, sublayer in enumerate(model.sublayers):
        whole = model.call(index, value, sides=batch)
        joined = torch.cat(
            [model.call(index, part_of(value, cut), sides=part_of(batch, cut)) for cut in cuts]
        )
        if by := find_gap(joined, whole, dtype):
            return (
                f"the output of sublayer {sublayer.name!r} depends on how a batch is split "
                f"({by}); let it treat each sample by itself"
            )
        value = whole
    return ""


def _refused_loss(own: OwnForward, loss_fn: Loss, batch: Batch) -> str:
    try:
        # A new Loss: one that is marked as exact would not be tried.
        refuse_split(Loss(loss_fn.function), own(batch)[0], own.model.targets_of(batch))
    except ValueError as error:
        return str(error)
    return ""


def _recorded(
    model: nn.Module, run: Callable[[Batch], _Result], batch: Batch
) -> tuple[_Result, dict[str, Tensor]]:
    """Run a function; return its result, and the modules' first outputs in the order of ending."""
    names = {module: name for name, module in model.named_modules() if name}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _inputs: object, output: object) -> None:
        if module in names and isinstance(output, Tensor):
            # A clone, as the next module may work in place; a module may be called twice.
            outputs.setdefault(names[module], output.detach().clone())

    with register_module_forward_hook(note):
        return run(batch), outputs

"""Verify a model: rank 0 compares its layers with its own forward, then all ranks take steps.

    at the start     a recorded model's outputs, loss and gradients, on its own weights
    verify()         the same, and what `sublayer_probe` looks for, on a twin; then real pipelines

Rank 0 looks for these, in this order, as each would show in the next: a forward that writes into
its own buffers; one that draws random numbers; sublayers that are not the model's forward; a
sublayer, or a loss, that depends on how a batch is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.loss import Loss, LossFunction
from autopipe.profile import left_as_found
from autopipe.random_state import random_state
from pipetransformer.checks.sublayer_probe import SublayerProbe
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
from pipetransformer.feed import Batch, find_changed
from pipetransformer.model import (
    WAYS_OUT,
    LayeredModel,
    Task,
    UnreadLogits,
    is_opaque,
    named_tensors,
    on_short_first,
    opaque_kept,
    whole_in_mode,
)
from pipetransformer.processes import World, told_by_rank_0

_LOGGER = logging.getLogger(__name__)
_PLAIN: dict[str, Any] = {
    "max_grad_norm": None, "cache": False, "on_nonfinite": "raise", "micro_batch_size": None,
    "num_workers": 0, "precision": None,
    "collate_fn": None,  # The batch is collated.
    # Graphs of a twin in float64 would take long, and are not those of the run.
    "compile": False, "compile_backend": "inductor", "compile_mode": None, "cuda_graph": False,
}  # fmt: skip
"""Settings of the steps that are verified."""


@dataclass(frozen=True)
class Verification:
    """Report a model that trains as its own forward does in a plain loop.

    Args:
        dtype: of the comparison: "float64", or "float32" where the model computes a part in
            float32 only. Rounding then hides smaller differences.
        num_tensors: parameters and buffers that were compared.
        in_pipelines: whether steps of pipelines were compared, too, which twins make. A model of
            more than 1 GiB is compared as it is.
    """

    dtype: str
    num_samples: int
    num_tensors: int
    in_pipelines: bool = True


_MOST_TWIN_BYTES = 1 << 30
"""Of weights: twins in float64 take four times as much on each rank."""


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
    if opaque := [n for n, one in named_tensors(model.model).items() if is_opaque(one)]:
        raise ValueError(
            f"{opaque[0]!r} is of a class of its own, as quantized weights are, and cannot be "
            "compared in another dtype: verify the model without quantization_config"
        )
    is_large = sum(one.nbytes for one in named_tensors(model.model).values()) > _MOST_TWIN_BYTES
    compare = _as_it_is if is_large else _with_twins
    compared, outcome = compare(task, world, loss_fn, batch)
    if outcome:
        raise VerificationError(outcome)
    num_tensors = sum(len(model.tensors(index)) for index in range(len(model.sublayers)))
    return Verification(compared, num_samples, num_tensors, in_pipelines=not is_large)


def _with_twins(
    task: Task, world: World, loss_fn: LossFunction | None, batch: Batch
) -> tuple[str, str]:
    """Compare twins, locally and in pipelines; return the dtype, and what differs, or ""."""
    model = task.model

    def twin(dtype: torch.dtype) -> Task:
        copied = make_twin(model, dtype)
        for name, parameter in copied.model.named_parameters():
            parameter.requires_grad_(name in task.trainable)
        return replace(task, model=copied, config=replace(task.config, **_PLAIN))

    computed, compared, outcome = told_by_rank_0(
        lambda: _verify_locally(twin, loss_fn, batch), group=world.group
    )
    if not outcome:
        dtype: torch.dtype = getattr(torch, computed)
        own_forward = OwnForward(make_twin(model, dtype), loss_fn) if world.is_main else None
        try:
            outcome = compare_steps(
                twin(dtype),
                world,
                own=own_forward,
                batch=converted(batch, dtype),
                dtype=getattr(torch, compared),
            )
        except RuntimeError as error:
            if world.size > 1:  # Other ranks wait elsewhere.
                raise
            outcome = f"it cannot be trained in parts: {error}"
    return compared, outcome


def _as_it_is(
    task: Task, world: World, loss_fn: LossFunction | None, batch: Batch
) -> tuple[str, str]:
    """Compare a model on its own weights, on rank 0; return the dtype, and what differs, or "".

    Its gradients take room twice.
    """

    def run() -> tuple[str, str]:
        own = OwnForward(task.model, loss_fn)
        found = compare_with_own_forward(task, own, _beside_weights(task, batch))
        return str(found.dtype).removeprefix("torch."), found.difference

    return told_by_rank_0(run, group=world.group)


def _beside_weights(task: Task, batch: Batch) -> Batch:
    device = next(task.model.model.parameters()).device
    return {name: entry.to(device) for name, entry in batch.items()}


def verify_recorded(
    task: Task, world: World, *, loss_fn: LossFunction | None, read: Callable[[], Batch]
) -> str:
    """Compare a model that is known by a recording alone with its own forward. Collective.

    Its outputs, its loss and every gradient are compared on two samples, on rank 0, without
    dropout. Both run the same kernels on the same weights, where these are: no copy of the model
    is made. Texts are cut short where their length is free.

    Returns:
        how they were found equal; "" for a model that was written down by hand.
    Raises:
        ValueError: on every rank: they differ.
    """
    if not task.model.is_recorded:
        return ""

    def run() -> str:
        return on_short_first(task.model.model, _beside_weights(task, read()), compare)

    def compare(batch: Batch) -> str:
        comparison = compare_with_own_forward(task, OwnForward(task.model, loss_fn), batch)
        if comparison.difference:
            raise ValueError(
                f"this {type(task.model.model).__name__} cannot be trained in parts: "
                f"{comparison.difference}. {WAYS_OUT}"
            )
        return "bit by bit" if comparison.is_exact else "to rounding"

    return told_by_rank_0(run, group=world.group)


@dataclass(frozen=True)
class Comparison:
    """Hold what a model's own forward and its sublayers have in common.

    Args:
        difference: the first in a sentence, or "".
        is_exact: whether all is equal bit by bit.
        dtype: the coarsest that was computed in.
    """

    difference: str
    is_exact: bool = False
    is_finite: bool = True
    dtype: torch.dtype = torch.float32


def compare_with_own_forward(task: Task, own: OwnForward, batch: Batch) -> Comparison:
    """Compare outputs, loss and gradients of a forward in training, but without dropout.

    Args:
        own: of the task's model.
        batch: where the model's weights are.
    Raises:
        RuntimeError: the model does not compute in its weights' dtype.
    """
    layered, model = task.model, task.model.model
    trained = {n: p for n, p in model.named_parameters() if n in task.trainable}
    device, narrowing = next(iter(batch.values())).device, _Narrowing()
    floating = [p.dtype for p in model.parameters() if p.is_floating_point()]
    weights = min(floating, key=lambda dtype: dtype.itemsize, default=torch.float32)
    with _lent(task, device):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        state = random_state(device)
        # Else nothing narrows, and compiled blocks would not run as compiled.
        with narrowing if weights == torch.float64 else nullcontext():
            expected, own_loss = own(batch)
        if written := find_changed(dict(model.named_buffers()), before):
            return Comparison(_WRITES.format(written))
        draws = random_state(device) != state
        targets = layered.targets_of(batch)
        # One loss for both: two ways to divide by a count may differ in the last bit.
        loss = mean_loss(task.loss_fn(expected, targets))
        if own.loss_fn is None and (by := _loss_gap(loss.detach(), own_loss.detach())):
            return Comparison(
                f"its loss was taken for {task.loss_fn.name!r}, but is another, {by}: give "
                "loss_fn="
            )
        theirs = {"": expected.detach(), **_gradients(loss, trained)}
        output, loss = _in_sublayers(task, batch, targets)
        ours = {"": output.detach(), **_gradients(loss, trained)}
    dtype = narrowing.coarsest(weights)
    if ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours):
        return Comparison("", is_exact=True, dtype=dtype)
    difference = _first_difference(ours, theirs, dtype)
    if difference and draws:
        difference = _DRAWS
    elif difference.startswith(_OTHER_OUTPUTS):
        difference += (
            f", {_where(own, batch, dtype)}; give the LayeredModel sublayers that do all that the "
            "forward does"
        )
    # Some masks are float32's least number, which overflows where it is multiplied.
    is_finite = all(bool(one.isfinite().all()) for one in theirs.values())
    return Comparison(difference, is_finite=is_finite, dtype=dtype)


@contextmanager
def _lent(task: Task, device: torch.device) -> Iterator[None]:
    """Have a model in training, without dropout and all that trains unfrozen; put that back."""
    model = task.model.model
    with (
        left_as_found([model], device),
        opaque_kept(named_tensors(model).values()),
        whole_in_mode(model, training=True),
        without_dropout(task.model),
    ):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in task.trainable)
        yield


def _in_sublayers(task: Task, batch: Batch, targets: Any) -> tuple[Tensor, Tensor]:
    """Return the output of a model's sublayers, and the loss as steps compute it."""
    model, words = task.model, task.model.words
    if words is None or not task.leaves_out_logits:
        output = model.run(batch)
        return output, mean_loss(task.loss_fn(output, targets))
    hidden = model.run(batch, headless=True)
    with torch.no_grad():
        output = words.logits(hidden)
    # Not by the task, which computes in the dtype of the run's autocast. In the backward, as TF32
    # rounds gradients otherwise that are multiplied later.
    unread = UnreadLogits(hidden, words, in_backward=True)
    return output, mean_loss(task.loss_fn(unread, targets))


_WRITES = (
    "the forward writes into {!r}, and what it writes depends on how a batch is split; use a "
    "layer without running statistics"
)
_DRAWS = (
    "the forward gives another output for the same batch: it draws random numbers that could not "
    "be switched off, perhaps; set its dropout to 0 before the model is verified"
)
_OTHER_OUTPUTS = "the model's own forward and its sublayers in order give other outputs"


def _loss_gap(ours: Tensor, own: Tensor) -> str:
    """Say how the loss that a model itself returns differs from that it was taken for, or ""."""
    allowed = 1e-4 if own.dtype in (torch.float32, torch.float64) else 3e-2
    one, other = float(ours.detach()), float(own.detach())
    # Two samples without a target have no loss.
    if math.isclose(one, other, rel_tol=allowed, abs_tol=1e-6) or math.isnan(one):
        return ""
    return f"{one:.7g} instead of {other:.7g}"


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients that there are, by the parameters' names; these have none then."""
    if loss.requires_grad:  # Not autograd.grad, which reentrant checkpointing does not allow.
        loss.backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def _first_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], dtype: torch.dtype
) -> str:
    """Say what differs by more than rounding, or ""; outputs are named "", gradients by name."""
    if by := find_gap(ours[""], theirs[""], dtype):
        return f"{_OTHER_OUTPUTS} ({by})"
    if odd := sorted(ours.keys() ^ theirs.keys()):
        state = "a" if odd[0] in ours else "no"
        return f"in its sublayers {odd[0]!r} has {state} gradient, unlike in its own forward"
    # A gradient that is 0 but for rounding is compared on the others' scale.
    gradients = [one for name, one in theirs.items() if name and one.numel()]
    scale = 1e-3 * max((float(one.abs().max()) for one in gradients), default=0)
    for name in theirs:
        if by := find_gap(ours[name], theirs[name], dtype, scale=scale):
            return f"the gradient of {name!r} differs {by} from that of its own forward"
    return ""


def _where(own: OwnForward, batch: Batch, dtype: torch.dtype) -> str:
    """Say from which module's output on a model's own forward and its sublayers differ."""
    model = own.model
    with torch.no_grad():
        theirs = _outputs(model.model, lambda: own(batch))
        ours = _outputs(model.model, lambda: model.run(batch))
    shared = (name for name in theirs if name in ours)
    first = next((name for name in shared if find_gap(ours[name], theirs[name], dtype)), None)
    return f"first in the output of {first!r}" if first else "behind the last module they share"


def _outputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Return the first outputs of a model's modules in a run, in the order of ending."""
    names = {module: name for name, module in model.named_modules() if name}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _inputs: object, output: object) -> None:
        if module in names and isinstance(output, Tensor):
            # A clone, as the next module may work in place; a module may be called twice.
            outputs.setdefault(names[module], output.detach().clone())

    with register_module_forward_hook(note):
        run()
    return outputs


def _verify_locally(
    twin: Callable[[torch.dtype], Task], loss_fn: LossFunction | None, batch: Batch
) -> list[str]:
    """Return the twin's dtype, that whose rounding is allowed for, and what differs.

    It is float64 where the model's forward goes through with it: what little is rounded to float32
    moves the sums less, and updates do not make that larger.
    """
    for dtype in (torch.float64, torch.float32):
        why = "not all is finite"
        try:
            task, samples = twin(dtype), converted(batch, dtype)
            tensors = named_tensors(task.model.model)
            before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            comparison = compare_with_own_forward(task, OwnForward(task.model, loss_fn), samples)
        except Exception as error:
            why, comparison = repr(error), None
        if dtype == torch.float64 and (comparison is None or not comparison.is_finite):
            _LOGGER.warning("the model does not compute in float64 (%s): float32 is compared", why)
        else:
            break
    if comparison is None:  # Returned, so that it becomes a VerificationError on every rank.
        return ["", "", f"the model's own forward could not be called: {why}"]
    written = find_changed(tensors, before)
    difference = comparison.difference or (
        _WRITES.format(written) if written else _probed(task, samples, comparison.dtype)
    )
    return [*(str(one).removeprefix("torch.") for one in (dtype, comparison.dtype)), difference]


def _probed(task: Task, batch: Batch, dtype: torch.dtype) -> str:
    """Say what a look at each sublayer, and at the loss, has found, or ""."""
    # A new Loss, as an exact one would not be tried.
    task = replace(task, loss_fn=Loss(task.loss_fn.function))
    try:
        SublayerProbe(task, torch.device("cpu"), batch, dtype=dtype).run()
    except Exception as error:
        return str(error)
    return ""


class _Narrowing(TorchDispatchMode):
    """Notice float64 that becomes another floating dtype, as where positions are rotated."""

    is_found = False

    def coarsest(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype whose rounding is in an output of a dtype."""
        return torch.float32 if self.is_found and dtype == torch.float64 else dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.is_found = self.is_found or output.dtype != torch.float64
        return output

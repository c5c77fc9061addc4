"""Compare, on one process, the layers one by one with the model's own forward and loss.

Found in this order, as each would show in what follows: a forward that writes into its own
tensors or draws random numbers, sublayers that are not the model's forward, one whose output
depends on how a batch is split, and a loss that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pipetransformer.adapters import LayeredModel, named_tensors
from pipetransformer.data import Batch, find_changed, part_of
from pipetransformer.loss import Loss, refuse_split
from pipetransformer.verification.model_copy import OwnForward
from pipetransformer.verification.tolerance import Tolerance

_Result = TypeVar("_Result")


def find_difference(own: OwnForward, loss_fn: Loss, batch: Batch, tolerance: Tolerance) -> str:
    """Return what differs first, in a sentence, or ""; the twin is of no use afterwards."""
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
        if tolerance.difference(again.nan_to_num(), expected[0].nan_to_num()):
            return (
                "the forward gives another output for the same batch: it draws random numbers "
                "that could not be switched off, perhaps; set its dropout to 0 before the model "
                "is verified"
            )
        return (
            _compare_forward(model, batch, expected[0], outputs, tolerance)
            or _find_split(model, batch, tolerance)
            or _refused_loss(own, loss_fn, batch)
        )


def _compare_forward(
    model: LayeredModel,
    batch: Batch,
    expected: Tensor,
    outputs: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> str:
    layered, ours = _recorded(model.model, model.run, batch)
    by = tolerance.difference(layered, expected)
    if not by:
        return ""
    shared = (name for name in outputs if name in ours)
    wrong = (name for name in shared if tolerance.difference(ours[name], outputs[name]))
    first = next(wrong, None)
    where = f"first in the output of {first!r}" if first else "behind the last module they share"
    return (
        "the model's own forward and its sublayers in order give other outputs "
        f"({by}), {where}; give the LayeredModel sublayers that do all that the forward does"
    )


def _find_split(model: LayeredModel, batch: Batch, tolerance: Tolerance) -> str:
    """Give each sublayer a batch, and its parts; both must give the same."""
    num_samples = len(batch[model.inputs[0]])
    cuts = (slice(0, num_samples // 2), slice(num_samples // 2, num_samples))
    value: Tensor | Batch = batch
    for index, sublayer in enumerate(model.sublayers):
        whole = model.call(index, value, sides=batch)
        joined = torch.cat(
            [model.call(index, part_of(value, cut), sides=part_of(batch, cut)) for cut in cuts]
        )
        if by := tolerance.difference(joined, whole):
            return (
                f"the output of sublayer {sublayer.name!r} depends on how a batch is split "
                f"({by}); let it treat each sample by itself"
            )
        value = whole
    return ""


def _refused_loss(own: OwnForward, loss_fn: Loss, batch: Batch) -> str:
    """Say that a loss depends on how a batch is split, also one that is known to be exact."""
    try:
        refuse_split(Loss(loss_fn.function), own(batch)[0], own.model.targets_of(batch))
    except ValueError as error:
        return str(error)
    return ""


def _recorded(
    model: nn.Module, run: Callable[[Batch], _Result], batch: Batch
) -> tuple[_Result, dict[str, Tensor]]:
    """Run something, and note the output of each module, in the order in which they end."""
    names = {module: name for name, module in model.named_modules() if name}
    outputs: dict[str, Tensor] = {}

    def note(module: nn.Module, _inputs: object, output: object) -> None:
        if module in names and isinstance(output, Tensor):
            outputs.setdefault(names[module], output.detach().clone())

    with register_module_forward_hook(note):
        return run(batch), outputs

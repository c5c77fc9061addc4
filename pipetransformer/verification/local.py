"""Compare, on one process, the layers one by one with the model's own forward and loss.

Found in this order, as each would show in what follows: a forward that writes into its own
tensors, sublayers that are not the model's forward, one whose output depends on how a batch is
split, and a loss that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipetransformer.adapters import LayeredModel
from pipetransformer.loss import Loss, mean_of
from pipetransformer.verification.tolerance import Tolerance
from pipetransformer.verification.twin import OwnForward, part_of

_Result = TypeVar("_Result")


def find_difference(
    own: OwnForward, loss_fn: Loss, batch: Mapping[str, Tensor], tolerance: Tolerance
) -> str:
    """Return what differs first, in a sentence, or "".

    Args:
        own: the forward of a twin in training mode, which is of no use afterwards.
        loss_fn: the loss that micro-batches are given.
        batch: two samples or more.
        tolerance: of two numbers that should be equal.
    Raises:
        ValueError: the forward draws random numbers.
    """
    model = own.model
    before = {name: t.detach().clone() for name, t in _named_tensors(model.model)}
    with torch.no_grad():
        expected, outputs = _recorded(model.model, own, batch)
        found = _find_written(model, before)
        if not found:
            _refuse_randomness(own, batch, tolerance)
            found = _compare_forward(model, batch, expected[0], outputs, tolerance)
            found = found or _find_split(model, batch, tolerance)
            found = found or _compare_loss(own, loss_fn, batch, tolerance)
    return found


def _refuse_randomness(own: OwnForward, batch: Mapping[str, Tensor], tolerance: Tolerance) -> None:
    outputs = []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            outputs.append(own(batch)[0])
        draws = not torch.equal(before, torch.get_rng_state())
    if draws and tolerance.differ(*outputs):
        raise ValueError(
            "the forward draws random numbers that could not be switched off; set its dropout to "
            "0 before the model is verified"
        )


def _compare_forward(
    model: LayeredModel,
    batch: Mapping[str, Tensor],
    expected: Tensor,
    outputs: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> str:
    """Compare the model's output with that of its sublayers in order."""
    layered, ours = _recorded(model.model, model.run, batch)
    if layered.shape == expected.shape and not tolerance.differ(layered, expected):
        return ""
    wrong = next(
        (
            name
            for name, output in outputs.items()
            if name in ours
            and (ours[name].shape != output.shape or tolerance.differ(ours[name], output))
        ),
        None,
    )
    where = f"first in the output of {wrong!r}" if wrong else "behind the last module they share"
    return (
        "the model's own forward and its sublayers in order give other outputs "
        f"({tolerance.describe(layered, expected)}), {where}; give the LayeredModel sublayers "
        "that do all that the forward does"
    )


def _find_split(model: LayeredModel, batch: Mapping[str, Tensor], tolerance: Tolerance) -> str:
    """Give each sublayer a batch, and its parts; both must give the same."""
    num_samples = len(batch[model.inputs[0]])
    cuts = (slice(0, num_samples // 2), slice(num_samples // 2, num_samples))
    value: Tensor | Mapping[str, Tensor] = batch
    for index, sublayer in enumerate(model.sublayers):
        whole = model.call(index, value, sides=batch)
        joined = torch.cat(
            [
                model.call(
                    index,
                    value[cut] if isinstance(value, Tensor) else part_of(value, cut),
                    sides=part_of(batch, cut),
                )
                for cut in cuts
            ]
        )
        if whole.shape != joined.shape or tolerance.differ(joined, whole):
            return (
                f"the output of sublayer {sublayer.name!r} depends on how a batch is split "
                f"({tolerance.describe(joined, whole)}); let it treat each sample by itself"
            )
        value = whole
    return ""


def _find_written(model: LayeredModel, before: Mapping[str, Tensor]) -> str:
    for name, tensor in _named_tensors(model.model):
        if not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
            return (
                f"the forward writes into {name!r}, and what it writes depends on how a batch is "
                "split; use a layer without running statistics"
            )
    return ""


def _compare_loss(
    own: OwnForward, loss_fn: Loss, batch: Mapping[str, Tensor], tolerance: Tolerance
) -> str:
    """Compare the model's mean loss with what the losses of parts join to."""
    model = own.model
    output, expected = own(batch)
    size = len(output)
    cuts = (slice(0, 1), slice(1, 1 + size // 2), slice(1 + size // 2, size))
    total = count = 0.0
    for cut in cuts:
        own_size = len(output[cut])
        if own_size:
            value = loss_fn(output[cut], model.targets_of(part_of(batch, cut)))
            pair = value if isinstance(value, tuple) else (value * own_size, own_size)
            total, count = total + float(pair[0]), count + float(pair[1])
    joined = torch.tensor(mean_of(total, count), dtype=torch.float64)
    if tolerance.differ(joined, expected.double()):
        return (
            f"the loss {loss_fn.name!r} is {float(expected):.9g} over {size} samples, and "
            f"{float(joined):.9g} when joined from parts; return (sum, count)"
        )
    return ""


def _recorded(
    model: nn.Module, run: Callable[[Mapping[str, Tensor]], _Result], batch: Mapping[str, Tensor]
) -> tuple[_Result, dict[str, Tensor]]:
    """Run something, and note the output of each module, in the order in which they end."""
    outputs: dict[str, Tensor] = {}
    with _noting(model, outputs):
        return run(batch), outputs


@contextmanager
def _noting(model: nn.Module, outputs: dict[str, Tensor]) -> Iterator[None]:
    def note(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.setdefault(name, output.detach().clone())

    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]

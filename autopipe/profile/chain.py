"""Run a chain of sublayers to time each of them and to count its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ProfiledSublayer:
    """Name a sublayer to measure, and how it is called.

    Args:
        layer: the layer that it freezes with; the number of layers for the head.
        call: takes the output of the sublayer below (None for the first) and the batch.
    """

    name: str
    layer: int
    module: nn.Module
    call: Callable[[Tensor | None, Mapping[str, Tensor]], Tensor]

    def run(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """Call it; a TypeError refuses what is not one tensor."""
        output = self.call(hidden, batch)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"sublayer {self.name!r} returned a {type(output).__name__}; it "
                f"must return one tensor: move side values into the batch"
            )
        return output


@contextmanager
def left_as_found(modules: Sequence[nn.Module], device: torch.device) -> Iterator[nn.ModuleList]:
    """Lend the modules for measuring; restore flags, buffers, gradients and random state."""
    everything = nn.ModuleList(modules)
    training = [(module, module.training) for module in everything.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in everything.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    gradients = [(p, p.grad, p.requires_grad) for p in everything.parameters()]
    everything.zero_grad()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            yield everything
    finally:
        for module, flag in training:
            module.training = flag
        for parameter, gradient, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        for module, name, buffer, value in buffers:
            # A forward may put another tensor in a buffer's place instead of writing into it.
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            buffer.copy_(value)


def device_of(batch: Mapping[str, Tensor]) -> torch.device:
    return next(iter(batch.values())).device


@dataclass(frozen=True)
class _Forward:
    """Hold a sublayer's forward: the leaf below it, its output, and what was measured."""

    below: Tensor | None
    output: Tensor
    measured: float


def _run_chain(
    sublayers: Sequence[ProfiledSublayer],
    run: Callable[[ProfiledSublayer, Tensor | None], tuple[Tensor, float]],
) -> list[_Forward]:
    """Run all forwards, the graph cut between sublayers as it is between stages."""
    below: Tensor | None = None
    forwards = []
    for sublayer in sublayers:
        # A copy, because a leaf that needs a gradient forbids layers that work in place.
        output, measured = run(sublayer, None if below is None else below.clone())
        forwards.append(_Forward(below, output, measured))
        below = output.detach().requires_grad_(output.is_floating_point())
    return forwards


def chain_bytes(
    sublayers: Sequence[ProfiledSublayer], batch: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Count the bytes of each sublayer, under the names of `SublayerCost`'s fields."""

    copies = []

    def counted(sublayer: ProfiledSublayer, hidden: Tensor | None) -> tuple[Tensor, int]:
        """Run a forward; count the bytes that its graph keeps, each storage once."""
        dtypes: dict[int, torch.dtype] = {}
        with saved_storages(dtypes) as saved:
            output = sublayer.run(hidden, batch)
        held = storages([*sublayer.module.parameters(), *sublayer.module.buffers()])
        activations = {address: saved[address] for address in saved.keys() - held.keys()}
        copies.append(_take_copies(activations, dtypes, sublayer.module.parameters()))
        return output, sum(activations.values())

    parameters = unshared(sublayer.module.parameters() for sublayer in sublayers)
    buffers = unshared(sublayer.module.buffers() for sublayer in sublayers)
    with left_as_found([one.module for one in sublayers], device_of(batch)) as modules:
        modules.train()
        forwards = _run_chain(sublayers, counted)
    num_samples = len(next(iter(batch.values())))
    return [
        {
            "parameter_bytes": sum(p.nbytes for p in weights),
            "gradient_bytes": sum(p.nbytes for p in weights if p.requires_grad),
            "buffer_bytes": sum(b.nbytes for b in beside),
            "saved_bytes": forward.measured / num_samples,
            "output_bytes": forward.output.nbytes / num_samples,
            "copy_bytes": copied,
        }
        for weights, beside, forward, copied in zip(
            parameters, buffers, forwards, copies, strict=True
        )
    ]


def _take_copies(
    saved: dict[int, int], dtypes: Mapping[int, torch.dtype], parameters: Iterable[Tensor]
) -> int:
    """Take the weights that an autocast has cast out of the saved storages; return their bytes.

    One is known by its size and by another dtype than its parameter's.
    """
    taken = 0
    for parameter in parameters:
        if parameter.ndim < 2:
            continue
        for address, num_bytes in saved.items():
            dtype = dtypes[address]
            is_cast = dtype.is_floating_point and dtype != parameter.dtype
            if is_cast and num_bytes == parameter.numel() * dtype.itemsize:
                taken += saved.pop(address)
                break
    return taken


def unshared(groups: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    """Leave each tensor to the first group that has it."""
    seen: set[int] = set()
    left = []
    for group in groups:
        fresh = {id(tensor): tensor for tensor in group if id(tensor) not in seen}
        seen.update(fresh)
        left.append(list(fresh.values()))
    return left


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address; views share one.

    On the meta device they have none, and are known by torch's own object.
    """
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr() or storage._cdata: storage.nbytes() for storage in found}


@contextmanager
def saved_storages(dtypes: dict[int, torch.dtype] | None = None) -> Iterator[dict[int, int]]:
    """Record the storages that graphs built inside keep until their backward, as `storages`.

    Args:
        dtypes: is given those of the tensors in them, by address.
    """
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found = storages([tensor])
        saved.update(found)
        if dtypes is not None:
            dtypes.update(dict.fromkeys(found, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def time_chain(
    sublayers: Sequence[ProfiledSublayer], modules: nn.ModuleList, batch: Mapping[str, Tensor]
) -> list[list[float]]:
    """Time forward, backward and frozen forward; three lists with the seconds of each sublayer.

    All forwards precede all backwards, as in a step: with only one sublayer's activations alive,
    their memory is warm and every time about a tenth too short.
    """
    device = device_of(batch)

    def timed(sublayer: ProfiledSublayer, hidden: Tensor | None) -> tuple[Tensor, float]:
        start_s = now_s(device)
        return sublayer.run(hidden, batch), now_s(device) - start_s

    modules.train()
    forwards = _run_chain(sublayers, timed)
    forward_s = [forward.measured for forward in forwards]
    backward_s = _time_backwards(forwards, device)
    modules.eval()
    with torch.no_grad():
        frozen_s = [forward.measured for forward in _run_chain(sublayers, timed)]
    return [forward_s, backward_s, frozen_s]


def chain_seconds(sublayers: Sequence[ProfiledSublayer], batch: Mapping[str, Tensor]) -> float:
    """Return the seconds of one forward, backward and frozen forward of the whole chain."""
    with left_as_found([one.module for one in sublayers], device_of(batch)) as modules:
        return sum(map(sum, time_chain(sublayers, modules, batch)))


def input_backward_shares(
    sublayers: Sequence[ProfiledSublayer],
    modules: nn.ModuleList,
    batch: Mapping[str, Tensor],
    *,
    rounds: int,
) -> list[float]:
    """Measure which share of each sublayer's backward its input's gradient takes, in [0, 1].

    Backwards with and without gradients for the parameters take turns.
    """
    trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    whole, inputs = list[list[float]](), list[list[float]]()
    modules.train()
    for _ in range(rounds):
        for requires_grad, measured in ((True, whole), (False, inputs)):
            for parameter in trained:
                parameter.requires_grad_(requires_grad)
            forwards = _run_chain(sublayers, lambda sub, hidden: (sub.run(hidden, batch), 0.0))
            measured.append(_time_backwards(forwards, device_of(batch)))
    medians_s = zip(*np.median([inputs, whole], axis=1).tolist(), strict=True)
    return [min(1.0, part_s / full_s) if full_s else 0.0 for part_s, full_s in medians_s]


def _time_backwards(forwards: list[_Forward], device: torch.device) -> list[float]:
    """Run the backwards from the last sublayer to the first; return seconds by sublayer."""
    gradient: Tensor | None = torch.ones_like(forwards[-1].output)
    backward_s = []
    while forwards:
        forward = forwards.pop()
        start_s = now_s(device)
        if forward.output.requires_grad and gradient is not None:
            forward.output.backward(gradient)
        backward_s.append(now_s(device) - start_s)
        gradient = None if forward.below is None else forward.below.grad
    return backward_s[::-1]


def now_s(device: torch.device) -> float:
    """Return the time when the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

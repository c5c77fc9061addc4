"""Measure a chain of sublayers: the seconds and the bytes of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import sub
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autopipe.profile.network import EXACT
from autopipe.profile.profile import TIMES, SublayerCost

_CHECKPOINTING = "gradient_checkpointing"
"""The flag that transformers sets on modules."""


@dataclass(frozen=True)
class ProfiledSublayer:
    """Name a sublayer to measure, and how it is called.

    Args:
        layer: the layer that it freezes with; the number of layers for the head.
        call: takes the output of the sublayer below (None for the first) and the batch.
        in_step: a context in which training steps run it. Times are taken in it; bytes, and the
            share of the input's backward, are not.
    """

    name: str
    layer: int
    module: nn.Module
    call: Callable[[Tensor | None, Mapping[str, Tensor]], Tensor]
    in_step: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self, hidden: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the sublayer; a TypeError if it returns something else than one tensor."""
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
    # To None: the gradients kept above must not be added to.
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
            # By values: batch norm writes without a version. A write that changes nothing would
            # be a change for whoever watches versions, as a backward that is yet to come does.
            if buffer.is_meta or not torch.equal(buffer, value):
                buffer.data.copy_(value)


def device_of(batch: Mapping[str, Tensor]) -> torch.device:
    return next(iter(batch.values())).device


@dataclass(frozen=True)
class _Forward:
    """Hold a sublayer's forward: the leaf below it, its output, and what was measured of it."""

    below: Tensor | None
    output: Tensor
    measured: Any


def _run_chain(
    sublayers: Sequence[ProfiledSublayer],
    run: Callable[[ProfiledSublayer, Tensor | None], tuple[Tensor, Any]],
) -> list[_Forward]:
    """Run all forwards, with the graph cut between sublayers as between stages."""
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
    num_samples = len(next(iter(batch.values())))

    def counted(sublayer: ProfiledSublayer, hidden: Tensor | None) -> tuple[Tensor, Any]:
        module = sublayer.module
        repeats = recomputes_itself(module)
        with keeping_activations(module), saved_storages() as saved:
            output = sublayer.run(hidden, batch)
        # Weights that a graph saves are there anyway.
        for address in storages([*module.parameters(), *module.buffers()]):
            saved.pop(address, None)
        copy_bytes = _take_copies(saved, module.parameters())
        saved_bytes = sum(num_bytes for num_bytes, _ in saved.values()) / num_samples
        # Without its graph: one sublayer's activations live at a time.
        return output.detach(), {
            "saved_bytes": saved_bytes,
            "output_bytes": output.nbytes / num_samples,
            "copy_bytes": copy_bytes,
            "recomputes": repeats,
        }

    parameters = unshared(sublayer.module.parameters() for sublayer in sublayers)
    buffers = unshared(sublayer.module.buffers() for sublayer in sublayers)
    with left_as_found([one.module for one in sublayers], device_of(batch)) as modules:
        modules.train()
        forwards = _run_chain(sublayers, counted)
    return [
        {
            "parameter_bytes": sum(p.nbytes for p in weights),
            "gradient_bytes": sum(p.nbytes for p in weights if p.requires_grad),
            "buffer_bytes": sum(b.nbytes for b in beside),
            **forward.measured,
        }
        for weights, beside, forward in zip(parameters, buffers, forwards, strict=True)
    ]


def recomputes_itself(module: nn.Module) -> bool:
    """Return whether a module of transformers was asked to run forward again in the backward."""
    return any(vars(part).get(_CHECKPOINTING) for part in module.modules())


@contextmanager
def keeping_activations(module: nn.Module) -> Iterator[None]:
    """Have a module keep what it would compute again."""
    parts = [part for part in module.modules() if vars(part).get(_CHECKPOINTING)]
    try:
        for part in parts:
            setattr(part, _CHECKPOINTING, False)
        yield
    finally:
        for part in parts:
            setattr(part, _CHECKPOINTING, True)


def _take_copies(saved: dict[int, tuple[int, torch.dtype]], parameters: Iterable[Tensor]) -> int:
    """Remove weights that autocast has cast from the saved storages; return their bytes."""
    taken = 0
    for parameter in parameters:
        if parameter.ndim < 2:
            continue
        # A cast weight has the parameter's size and another floating-point dtype.
        for address, (num_bytes, dtype) in saved.items():
            is_cast = dtype.is_floating_point and dtype != parameter.dtype
            if is_cast and num_bytes == parameter.numel() * dtype.itemsize:
                taken += num_bytes
                del saved[address]
                break
    return taken


def unshared(groups: Iterable[Iterable[Tensor]]) -> list[list[Tensor]]:
    """Return the groups, each tensor only in the first group that has it."""
    seen: set[int] = set()
    left = []
    for group in groups:
        fresh = {id(tensor): tensor for tensor in group if id(tensor) not in seen}
        seen.update(fresh)
        left.append(list(fresh.values()))
    return left


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address; views share a storage."""
    of_tensors = (one.untyped_storage() for tensor in tensors for one in _opened(tensor))
    # On the meta device addresses are 0; torch's own object then tells storages apart.
    return {storage.data_ptr() or storage._cdata: storage.nbytes() for storage in of_tensors}


def _opened(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a wrapper, such as a quantized weight, has its numbers in."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _opened(getattr(tensor, name))


@contextmanager
def saved_storages() -> Iterator[dict[int, tuple[int, torch.dtype]]]:
    """Record the bytes and dtypes of storages that graphs built inside keep, by address."""
    saved: dict[int, tuple[int, torch.dtype]] = {}

    def keep(tensor: Tensor) -> Tensor:
        for address, num_bytes in storages([tensor]).items():
            saved[address] = num_bytes, tensor.dtype
        # An output that its own graph keeps would hold that graph for ever, and be held by it.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def graph_leaves(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves whose gradients the graphs of tensors accumulate, and which these hold."""
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        # Only AccumulateGrad nodes have a variable.
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)


def time_chain(
    sublayers: Sequence[ProfiledSublayer], modules: nn.ModuleList, batch: Mapping[str, Tensor]
) -> list[list[float]]:
    """Time forward, backward and frozen forward; three lists with the seconds of each sublayer."""
    device = device_of(batch)

    def timed(sublayer: ProfiledSublayer, hidden: Tensor | None) -> tuple[Tensor, float]:
        start_s = now_s(device)
        return sublayer.run(hidden, batch), now_s(device) - start_s

    modules.train()
    # All forwards precede all backwards, as in a step. With only one sublayer's activations alive,
    # memory is warm, and times were about a tenth too short.
    with ExitStack() as stack:
        for sublayer in sublayers:
            stack.enter_context(sublayer.in_step())
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
    """Measure which share of each sublayer's backward its input's gradient takes, in [0, 1]."""
    trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    whole, inputs = list[list[float]](), list[list[float]]()
    modules.train()
    for _ in range(rounds):
        # Backwards with and without the parameters' gradients take turns, so that drift cancels.
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
        # Popped, so that a sublayer's activations are freed behind its backward, as in a step.
        forward = forwards.pop()
        start_s = now_s(device)
        if forward.output.requires_grad and gradient is not None:
            forward.output.backward(gradient)
        backward_s.append(now_s(device) - start_s)
        gradient = None if forward.below is None else forward.below.grad
    return backward_s[::-1]


def now_s(device: torch.device) -> float:
    """Return the time when the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class MeasuredChain:
    """Hold a measured chain of sublayers, bottom first; times are medians of rounds.

    Args:
        rounds_s: a row for each batch, with the sum of all sublayers' times in each round.
    """

    costs: tuple[SublayerCost, ...]
    rounds_s: tuple[tuple[float, ...], ...]


def profile_sublayers(
    sublayers: Sequence[ProfiledSublayer],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    repeats: int = 3,
) -> MeasuredChain:
    """Measure every sublayer on its real input; the modules are left as they were.

    Measure before anything is frozen: a frozen parameter has no backward. The backward's share for
    the input is measured at the middle size. Optimizer state is left at 0 bytes.

    Args:
        sublayers: bottom first; each output is the next sublayer's input.
        batches: one for each micro-batch size, on the device to measure; (B, ...) tensors.
        repeats: measured rounds, after one to warm up.
    Raises:
        TypeError: a sublayer returns something else than one tensor.
    """
    middle = batches[len(batches) // 2]
    with left_as_found([one.module for one in sublayers], device_of(middle)) as modules:
        sizes = chain_bytes(sublayers, batches[-1])
        rounds = _time_rounds(sublayers, modules, batches, repeats)
        shares = input_backward_shares(sublayers, modules, middle, rounds=min(repeats, 2))
    # (size, kind, sublayer); kinds are forward, backward, frozen.
    medians_s = np.median(rounds, axis=0)
    # Every sublayer's quartiles, averaged over sizes.
    by_size = np.moveaxis(np.sum(rounds, axis=2), 1, 0)
    spreads = np.mean([[quartiles(repeats) for repeats in each.T] for each in by_size], axis=0)
    costs = []
    for index, sublayer in enumerate(sublayers):
        forward_s, backward_s, frozen_s = map(tuple, medians_s[:, :, index].T.tolist())
        input_s = tuple(shares[index] * seconds for seconds in backward_s)
        times = forward_s, input_s, tuple(map(sub, backward_s, input_s)), frozen_s
        costs.append(
            SublayerCost(
                sublayer.name,
                sublayer.layer,
                *times,
                optimizer_bytes=0,
                **sizes[index],
                spread=tuple(spreads[index].tolist()),
            )
        )
    return MeasuredChain(tuple(costs), _totals(rounds))


def join_chains(chains: Sequence[MeasuredChain]) -> MeasuredChain:
    """Join the measured parts of a chain, bottom first, of equally many rounds."""
    parts = [chain.rounds_s for chain in chains]
    return MeasuredChain(
        tuple(cost for chain in chains for cost in chain.costs),
        tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*parts, strict=True)),
    )


def join_sizes(chains: Sequence[MeasuredChain]) -> MeasuredChain:
    """Join one chain's measurements at different sizes, ascending; bytes are the last's."""
    costs = []
    for same in zip(*(chain.costs for chain in chains), strict=True):
        times: dict[str, Any] = {
            name: tuple(second for cost in same for second in getattr(cost, name))
            for name in TIMES
        }
        low, high = np.mean([cost.spread for cost in same], axis=0).tolist()
        costs.append(replace(same[-1], **times, spread=(low, high)))
    return MeasuredChain(tuple(costs), tuple(row for chain in chains for row in chain.rounds_s))


def time_rounds(
    sublayers: Sequence[ProfiledSublayer], batches: Sequence[Mapping[str, Tensor]], *, repeats: int
) -> tuple[tuple[float, ...], ...]:
    """Return `MeasuredChain.rounds_s` alone; the modules are left as they were."""
    with left_as_found([one.module for one in sublayers], device_of(batches[-1])) as modules:
        return _totals(_time_rounds(sublayers, modules, batches, repeats))


def _time_rounds(
    sublayers: Sequence[ProfiledSublayer],
    modules: nn.ModuleList,
    batches: Sequence[Mapping[str, Tensor]],
    repeats: int,
) -> list[list[list[list[float]]]]:
    """Time every batch in every round, as `time_chain` does, after a round to warm up."""
    # Sizes take turns, so that a disturbed moment spoils one round, which the median drops.
    return [
        [time_chain(sublayers, modules, batch) for batch in batches] for _ in range(repeats + 1)
    ][1:]


def _totals(rounds: list[list[list[list[float]]]]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(sum(map(sum, chain)) for chain in chains) for chains in zip(*rounds, strict=True)
    )


def quartiles(repeats_s: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of repeats, as shares of their median."""
    low_s, median_s, high_s = np.quantile(repeats_s, (0.25, 0.5, 0.75)).tolist()
    return (low_s / median_s, high_s / median_s) if median_s > 0 else EXACT


def uncertainty(rounds_s: Sequence[float]) -> float:
    """Return the standard error of the median of repeats, as a share of it; 0 for one."""
    if len(rounds_s) < 2:
        return 0.0
    # A sample's median varies 1.25 times as much as its mean does.
    error_s = 1.25 * statistics.stdev(rounds_s) / len(rounds_s) ** 0.5
    return error_s / max(statistics.median(rounds_s), 1e-9)

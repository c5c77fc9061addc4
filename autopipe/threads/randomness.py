"""Make each micro-batch's random numbers repeatable, also with partitions in threads.

torch has one generator for the whole CPU. Partitions that run at the same time would draw from it
in a random order, and a repeated forward would draw other numbers. So each forward of a
micro-batch through a partition draws from a state of its own. It is the generator's present state
if partitions run one at a time, else a seed made from one draw of the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.engine import ForwardPass

_CPU = torch.device("cpu")


@cache
def _lock(device: torch.device) -> Any:
    """Return the lock of a device's default generator."""
    return threading.RLock()


def may_draw(module: nn.Module) -> bool:
    """Return whether a forward may draw random numbers."""
    return any(_may_draw(part) for part in module.modules())


def _may_draw(module: nn.Module) -> bool:
    # Of code that is not torch's nothing is known.
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return True
    if not type(module).__module__.startswith("torch.nn.modules"):
        return True
    if isinstance(module, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    # torch's other layers draw only by a dropout rate, in training.
    draws = isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)
    return draws and module.training


class _DrawFrom(TorchDispatchMode):
    """Let operations on the CPU draw from a generator instead of torch's default."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Draws inside compiled layers must come here, too.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func) or kwargs.get("generator") is not None or not _is_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        if _takes_generator(func):
            return func(*args, **kwargs, generator=self._generator)
        # It draws from the default generator only: lend it our state.
        default = torch.default_generator
        with _lock(_CPU), _put_at(default, self._generator.get_state()):
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(default.get_state())


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    devices = [tensor.device for tensor in tensors] or [torch.device(device or "cpu")]
    return all(device.type == "cpu" for device in devices)


@contextmanager
def _put_at(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


class Randomness:
    """Manage the random numbers of one partition's forwards in one step.

    Without a seed, for partitions that run at the same time, forwards draw from torch's own
    generator, as in the plain model. A partition that is alone may change that one.
    """

    def __init__(
        self, device: torch.device, *, seed: int | None, draws: bool, alone: bool = False
    ) -> None:
        self._devices = [_CPU] if device.type != "cuda" else [_CPU, device]
        self._seed, self._draws, self._alone = seed, draws, alone
        self._states: dict[int, list[Tensor]] = {}

    def of(self, forward: ForwardPass) -> AbstractContextManager[None]:
        """Let a forward inside draw its micro-batch's numbers; a repetition draws the same."""
        micro_batch = forward.micro_batch
        if not self._draws:
            return nullcontext()
        if self._seed is not None:
            seed = self._seed + micro_batch
            generators = [torch.Generator(device).manual_seed(seed) for device in self._devices]
            return self._drawing_from([generator.get_state() for generator in generators])
        if forward.recomputing:
            return self._drawing_from(self._states[micro_batch])
        if forward.checkpointing:
            self._states[micro_batch] = [
                _default_generator(device).get_state() for device in self._devices
            ]
        return nullcontext()

    @contextmanager
    def _drawing_from(self, states: list[Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            if self._alone:
                stack.enter_context(_put_at(torch.default_generator, states[0]))
            else:
                generator = torch.Generator()
                generator.set_state(states[0])
                stack.enter_context(_DrawFrom(generator))
            for device, state in zip(self._devices[1:], states[1:], strict=True):
                # CUDA's operations take no generator. The lock keeps partitions that share a
                # device apart; it is held while kernels are launched, not while they run.
                stack.enter_context(_lock(device))
                stack.enter_context(_put_at(_default_generator(device), state))
            yield


def randomness_of(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    *,
    num_micro_batches: int,
    concurrent: bool,
) -> list[Randomness]:
    """Return each stage's randomness; `concurrent` stages get seeds by a draw of the caller's."""
    draws = [may_draw(module) for module in modules]
    seeds: list[int | None] = [None] * len(draws)
    if concurrent and any(draws):
        # One draw of the caller's, whatever is drawn from it, keeps later numbers repeatable.
        base = int(torch.randint(2**62, (), device="cpu"))
        seeds = [base + stage * num_micro_batches for stage in range(len(draws))]
    return [
        Randomness(device, seed=seed, draws=drawn, alone=len(draws) == 1)
        for device, seed, drawn in zip(devices, seeds, draws, strict=True)
    ]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]

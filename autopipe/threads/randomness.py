"""Make each micro-batch's random numbers repeatable, also where partitions run in threads.

torch has one generator for the whole CPU. Partitions that run at the same time would draw from it
in an order that changes from run to run, and a recomputation could not draw again what its forward
drew. So every forward of a micro-batch through a partition draws from a state of its own: what the
generator held when it began, where only one partition runs at a time, or else a seed made from one
draw of the caller's. Random numbers of Python and NumPy are not managed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


@cache
def _default_generator_lock(device: torch.device) -> Any:
    return threading.RLock()


def may_draw(module: nn.Module) -> bool:
    """Tell whether a forward may draw random numbers: any layer of the user's may."""
    return any(_may_draw(part) for part in module.modules())


def _may_draw(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return True
    if not type(module).__module__.startswith("torch.nn.modules"):
        return True
    if isinstance(module, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    draws = isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)
    return draws and module.training


class _DrawFrom(TorchDispatchMode):
    """Let this thread's random operations on the CPU draw from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run compiled; what they draw while they run comes here."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func) or kwargs.get("generator") is not None or not _is_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        if _takes_generator(func):
            return func(*args, **kwargs, generator=self._generator)
        return self._lend_default_generator(func, args, kwargs)

    def _lend_default_generator(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operation that always draws from the default generator, in our state."""
        with (
            _default_generator_lock(torch.device("cpu")),
            _default_generator_at(self._generator.get_state()),
        ):
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(torch.get_rng_state())


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
def _default_generator_at(state: Tensor) -> Iterator[None]:
    """Put the CPU's generator in a state, and back."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class Randomness:
    """Give one partition's forwards their random numbers during one step.

    Args:
        device: of the partition.
        seed: of this partition and step, for partitions that run at the same time; None where
            one runs after another, which then draw as the model alone would.
        draws: whether there is anything to manage.
        alone: whether there is no other partition, so that torch's own generator can be put back
            for a repetition.
    """

    def __init__(
        self, device: torch.device, *, seed: int | None, draws: bool, alone: bool = False
    ) -> None:
        self._device, self._seed, self._draws, self._alone = device, seed, draws, alone
        self._states: dict[int, list[Tensor]] = {}

    def of_forward(self, micro_batch: int, *, repeated: bool) -> AbstractContextManager[None]:
        """Draw, in the forward inside, what belongs to this micro-batch.

        Args:
            micro_batch: whose.
            repeated: whether a recomputation will have to draw the same again.
        """
        if not self._draws:
            return nullcontext()
        if self._seed is not None:
            return self._seeded(self._seed + micro_batch)
        if repeated:
            self._states[micro_batch] = self._default_states()
        return nullcontext()

    def of_recomputation(self, micro_batch: int) -> AbstractContextManager[None]:
        """Draw, in the forward inside, what its first execution drew."""
        if not self._draws:
            return nullcontext()
        if self._seed is not None:
            return self._seeded(self._seed + micro_batch)
        return self._replayed(self._states[micro_batch])

    def _default_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    @contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        generator = torch.Generator().manual_seed(seed)
        with _DrawFrom(generator), self._cuda_generator_at(None, seed):
            yield

    @contextmanager
    def _replayed(self, states: list[Tensor]) -> Iterator[None]:
        generator = torch.Generator()
        generator.set_state(states[0])
        from_state = _default_generator_at(states[0]) if self._alone else _DrawFrom(generator)
        with from_state, self._cuda_generator_at(states[-1], None):
            yield

    @contextmanager
    def _cuda_generator_at(self, state: Tensor | None, seed: int | None) -> Iterator[None]:
        """Put the device's generator in a state, and back after the forward.

        Its operations do not take a generator as an argument. The lock is for partitions that
        share a device; it is held while kernels are launched, not while they run.
        """
        if self._device.type != "cuda":
            yield
            return
        with _default_generator_lock(self._device), torch.cuda.device(self._device):
            before = torch.cuda.get_rng_state(self._device)
            try:
                if state is not None:
                    torch.cuda.set_rng_state(state, self._device)
                elif seed is not None:
                    torch.cuda.manual_seed(seed)
                yield
            finally:
                torch.cuda.set_rng_state(before, self._device)

"""Find out what is random in a loop, without changing its random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetransformer.feed import own_random_numbers
from pipetransformer.model import whole_in_mode


class _ReachedError(Exception):
    """Say that a forward has come as far as it is looked at."""


def draws_below(model: nn.Module, block: nn.Module, entries: Mapping[str, Tensor]) -> bool:
    """Tell whether a training forward draws random numbers before a block has returned.

    What is frozen runs in eval mode, but not the modules around it: they may drop blocks out, or
    hidden states between them. Rows would lack that.
    """
    device = next(model.parameters()).device

    def stop(*_: object) -> None:
        raise _ReachedError

    handle = block.register_forward_hook(stop)
    try:
        with (
            own_random_numbers(device),
            torch.no_grad(),
            whole_in_mode(model, training=True),
            torch.compiler.set_stance("force_eager"),
        ):
            before = _states(device)
            with suppress(_ReachedError):
                model(**entries)
            return _states(device) != before
    finally:
        handle.remove()


def draws_in_reading(read: Callable[[], object], owners: tuple[object, ...]) -> tuple[bool, bool]:
    """Return whether a read draws from generators of all, and from those of its owners.

    Args:
        owners: what is read, and what reads it; their attributes are looked through.
    """
    with own_random_numbers(_CPU), generators_kept(*owners):
        before, own = _states(_CPU), [state() for state in _own_states(owners)]
        read()
        after = [state() for state in _own_states(owners)]
        return _states(_CPU) != before, after != own


_CPU = torch.device("cpu")


def _states(device: torch.device) -> list[Any]:
    """Return where the generators are that models draw from."""
    on_gpu = [torch.cuda.get_rng_state(device).tolist()] if device.type == "cuda" else []
    plain = np.random.get_state()
    return [torch.get_rng_state().tolist(), on_gpu, random.getstate(), str(plain)]


def _own_states(owners: tuple[object, ...]) -> list[Callable[[], Any]]:
    """Return what tells the state of each generator that objects hold."""
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return [partial(_state, value) for value in _held_by(owners) if isinstance(value, kinds)]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.get_state())


def _held_by(owners: tuple[object, ...]) -> Iterator[object]:
    """Yield objects' attributes, and those of these: a data set's transforms hold generators."""
    for owner in owners:
        for value in list(getattr(owner, "__dict__", {}).values()):
            yield value
            several = value if isinstance(value, (list, tuple)) and len(value) <= 64 else [value]
            for one in several:
                yield from getattr(one, "__dict__", {}).values()


@contextmanager
def generators_kept(*owners: object) -> Iterator[None]:
    """Put back, behind the block, the generators that objects hold, or objects of theirs.

    A collator that masks tokens with a seed of its own is one: looking at samples must not shift
    what it draws in the loop.
    """
    with ExitStack() as after:
        for value in _held_by(owners):
            if isinstance(value, torch.Generator):
                after.callback(value.set_state, value.get_state())
            elif isinstance(value, random.Random):
                after.callback(value.setstate, value.getstate())
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                after.callback(setattr, bits, "state", bits.state)
            elif isinstance(value, np.random.RandomState):
                after.callback(value.set_state, value.get_state())
        yield

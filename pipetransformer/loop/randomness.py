"""Find out what is random in a loop, without changing its random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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


def _states(device: torch.device) -> list[Any]:
    """Return where the generators are that models draw from."""
    on_gpu = [torch.cuda.get_rng_state(device).tolist()] if device.type == "cuda" else []
    plain = np.random.get_state()
    return [torch.get_rng_state().tolist(), on_gpu, random.getstate(), str(plain)]


@contextmanager
def generators_kept(*owners: object) -> Iterator[None]:
    """Put back, behind the block, the generators that objects hold as attributes.

    A collator that masks tokens with a seed of its own is one: looking at samples must not shift
    what it draws in the loop.
    """
    with ExitStack() as after:
        for owner in owners:
            for value in getattr(owner, "__dict__", {}).values():
                if isinstance(value, torch.Generator):
                    after.callback(value.set_state, value.get_state())
                elif isinstance(value, random.Random):
                    after.callback(value.setstate, value.getstate())
                elif isinstance(value, np.random.Generator):
                    bits = value.bit_generator
                    after.callback(setattr, bits, "state", bits.state)
        yield

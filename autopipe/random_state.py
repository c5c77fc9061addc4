"""Compare states of the random generators, to see whether code between them drew numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["plain_random_state", "random_state"]


def random_state(device: torch.device) -> bytes:
    """Return the state of every generator that layers and losses on a device draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join([*(state.numpy().tobytes() for state in states), plain_random_state()])


def plain_random_state() -> bytes:
    """Return the states of Python's and numpy's generators, comparable within this process."""
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    # A hash, because Python's state is 625 numbers; equal states have equal hashes.
    state = numpys["state"]
    return f"{hash(random.getstate())} {state['pos']} ".encode() + bytes(state["key"])

"""Seed the generators that layers, losses and data draw from, tell their states, put them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of a device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_plainly(seed: int) -> None:
    """Seed Python's and numpy's generators, which takes five times as long as torch's."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Seed generators as is needed meanwhile; afterwards the caller's go on where they were."""
    plain, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpys)


def random_state(device: torch.device) -> bytes:
    """Tell states of the generators apart that layers and losses on a device draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join([*(state.numpy().tobytes() for state in states), plain_random_state()])


def plain_random_state() -> bytes:
    """Tell states of Python's and numpy's generators apart, within this process."""
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    state = numpys["state"]
    return f"{hash(random.getstate())} {state['pos']} ".encode() + bytes(state["key"])

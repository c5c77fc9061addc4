"""Seed the generators that layers, losses and data draw from, and put them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of a device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # torch.cuda.manual_seed does the same and is slower; each sublayer's forward waits for it.
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


def seed_plainly(seed: int) -> None:
    """Seed Python's and numpy's generators, which takes five times as long as torch's."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed every generator that data may draw from."""
    seed_torch(seed, device)
    seed_plainly(seed)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Let the block seed all generators; afterwards the caller's go on where they were."""
    plain, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpys)

"""Seed the generators that layers, losses and data draw from, and put them back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import numpy as np
import torch

_WATCHED = 0x5EED
_CPU = torch.device("cpu")
_T = TypeVar("_T")


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


def run_seeded(run: Callable[[], _T], seed: int) -> tuple[_T, bool]:
    """Run a function under a seed of all generators; return whether it has drawn, too."""
    seed_all(seed, _CPU)
    value, drawn = run(), _drawn()
    seed_all(seed, _CPU)
    return value, drawn != _drawn()


def watch_draws() -> None:
    """Seed every generator, so that `has_drawn` can tell whether anything draws from now on."""
    seed_all(_WATCHED, _CPU)


def has_drawn() -> bool:
    """Return whether anything has drawn, or seeded, since `watch_draws`; draws itself."""
    # A number each is drawn in a tenth of the time that it takes to read the states.
    return _drawn() != _first_drawn()


@cache
def _first_drawn() -> tuple[float, float, float]:
    watch_draws()
    return _drawn()


def _drawn() -> tuple[float, float, float]:
    drawn = torch.rand((), dtype=torch.float32, device=_CPU)
    return float(drawn), float(np.random.random_sample()), random.random()


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

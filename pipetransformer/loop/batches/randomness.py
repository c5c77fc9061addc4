"""Find out what is random in a loop, without changing its random numbers."""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.random_state import random_state
from pipetransformer.feed import (
    SampleFeed,
    Samples,
    attributes_of,
    numbers_in,
    own_random_numbers,
)

_LOGGER = logging.getLogger(__name__)
_MOST_READ = 16
"""Samples at which it is looked whether reading draws random numbers."""


def draws_in_reading(read: Callable[[], object], owners: tuple[object, ...]) -> tuple[bool, bool]:
    """Return whether a read draws from generators of all, and from those of its owners.

    Args:
        owners: what is read, and what reads it; their attributes are looked through.
    """
    with own_random_numbers(_CPU), generators_kept(*owners):
        before = _told(_generators_of(owners))
        read()
        after = _told(_generators_of(owners))
        return after[0] != before[0], after[1] != before[1]


def warn_of_draws(feed: SampleFeed, samples: Samples, *, is_read_here: bool) -> None:
    """Give up the cache where reading samples draws what the loop would miss.

    Args:
        is_read_here: whether the loop's own process reads samples, and not a worker.
    """
    dataset: Any = samples.dataset
    owners = (dataset, samples.collation.function)
    ids = samples.spread(_MOST_READ)
    drawn = [draws_in_reading(partial(dataset.__getitem__, index), owners) for index in ids]
    draws, draws_own = map(any, zip(*drawn, strict=True))
    if not feed.keeper.may_cache or not (draws or draws_own):
        return
    if draws and is_read_here:
        feed.keeper.give_up()
        _LOGGER.warning(
            "no cache: the data set draws random numbers when a sample is read, without "
            "effect on those that were looked at; without the reads the loop's own random "
            "numbers would be others. Draw from a generator of the data set's own, or read by "
            "workers"
        )
    else:
        _LOGGER.warning(
            "the data set draws random numbers when a sample is read, without effect on the "
            "%d that were looked at: a change that is seldom cannot be seen, and would be "
            "kept in rows. Where there is one, freeze without rows by freeze.apply",
            len(ids),
        )


_CPU = torch.device("cpu")
_MOST_LEVELS, _MOST_HELD, _MOST_MEMBERS = 5, 1000, 64
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _comparable(state: Any) -> Any:
    """Return a generator's state with its arrays as bytes: their texts take a millisecond."""
    if isinstance(state, Tensor):
        state = state.numpy()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if type(state) is tuple and any(isinstance(value, np.ndarray) for value in state):
        return tuple(map(_comparable, state))
    return state


def _raw(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    is_pythons = isinstance(generator, random.Random)
    return generator.getstate() if is_pythons else generator.get_state()


def _put(generator: Any, raw: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = raw
    elif isinstance(generator, random.Random):
        generator.setstate(raw)
    else:
        generator.set_state(raw)


def _held_by(owners: tuple[object, ...]) -> Iterator[object]:
    """Yield what objects hold, in attributes, lists, closures and arguments, some levels deep.

    A data set's transforms hold generators. Of modules, which are many, two levels are enough.
    """
    for owner in owners:
        most = math.inf if isinstance(owner, nn.Module) else _MOST_HELD
        levels = 2 if isinstance(owner, nn.Module) else _MOST_LEVELS
        waiting, seen = deque([(owner, levels)]), set[int]()
        while waiting and len(seen) < most:
            value, levels = waiting.popleft()
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                waiting.extend((one, levels - 1) for one in _members_of(value) if levels)


def _members_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [*value] if len(value) <= _MOST_MEMBERS else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    own = [*getattr(value, "__dict__", {}).values()] if not isinstance(value, type) else []
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # A name that is yet to be bound.
            own += [cell.cell_contents for cell in value.__closure__ or ()]
        own += value.__defaults__ or ()
    return own


def _generators_of(owners: tuple[object, ...]) -> list[Any]:
    return [value for value in _held_by(owners) if isinstance(value, _KINDS)]


@dataclass(frozen=True)
class States:
    """Hold where generators are: those of all, and those that some objects hold."""

    told: list[Any]
    torchs: Tensor
    plain: Any
    numpys: Any
    held: list[tuple[Any, Any]]

    def differ(self, *, held: bool = True) -> bool:
        """Return whether any has moved on; without `held`, whether any of all has."""
        now = _told([generator for generator, _ in self.held])
        return self.told != now if held else bool(self.told[0] != now[0])

    def put_back(self) -> None:
        torch.set_rng_state(self.torchs)
        random.setstate(self.plain)
        np.random.set_state(self.numpys)
        for generator, raw in self.held:
            _put(generator, raw)


def states_of(owners: tuple[object, ...]) -> States:
    """Return where generators are now."""
    held = [(generator, _raw(generator)) for generator in _generators_of(owners)]
    told = _told([generator for generator, _ in held])
    return States(told, torch.get_rng_state(), random.getstate(), np.random.get_state(), held)


def _told(generators: list[Any]) -> list[Any]:
    return [random_state(_CPU), [_comparable(_raw(one)) for one in generators]]


@contextmanager
def collating_kept(dataset: object, collate: object) -> Iterator[None]:
    """Have looks at batches leave no trace in generators, nor in what a collate_fn counts.

    A data set's numbers stay: they may say where a file of its own stands.
    """
    own = attributes_of(collate)
    before, numbers = dict(own), numbers_in(own)
    with generators_kept(dataset, collate):
        try:
            yield
        finally:
            own.update(numbers)
            # A generator that was made at its first use is to be made anew.
            for name in [n for n, value in own.items() if isinstance(value, _KINDS)]:
                if name not in before:
                    del own[name]
                elif before[name] is None:
                    own[name] = None


@contextmanager
def generators_kept(*owners: object) -> Iterator[None]:
    """Put back, behind the block, the generators that objects hold, or objects of theirs.

    A collator that masks tokens with a seed of its own is one: looking at samples must not shift
    what it draws in the loop.
    """
    held = [(generator, _raw(generator)) for generator in _generators_of(owners)]
    try:
        yield
    finally:
        for generator, raw in held:
            _put(generator, raw)

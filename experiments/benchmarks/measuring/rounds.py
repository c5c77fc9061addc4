"""Time actions in turn on a noisy machine, and compare them round by round."""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Seconds = dict[str, np.ndarray]
"""Seconds of each action by its name, one entry a round."""
_RESAMPLES = 10_000


class ResultsDifferError(RuntimeError):
    """Say which result of a contestant is not the plain model's."""


@dataclass(frozen=True)
class Ratio:
    """Hold the median ratio of paired times and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def seconds_of(action: Callable[[], object]) -> float:
    """Time an action."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleave(
    actions: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int,
    warm_up: int = 1,
    clock: Callable[[Callable[[], Any]], float] = seconds_of,
) -> Seconds:
    """Time every action once a round, in an order that is drawn anew (the same in each process).

    Garbage is collected before a round and not within it, as its moment would be chance.

    Args:
        num_rounds: rounds that count.
        warm_up: rounds before them.
        clock: times one action.
    """
    shuffle = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(warm_up + num_rounds):
        names = list(actions)
        shuffle.shuffle(names)
        gc.collect()
        gc.disable()
        try:
            for name in names:
                seconds = clock(actions[name])
                if number >= warm_up:
                    found[name].append(seconds)
        finally:
            gc.enable()
    return {name: np.array(values) for name, values in found.items()}


def bootstrap(ratios: np.ndarray) -> Ratio:
    """Return the median of the ratios and the 95 % interval of resampled medians."""
    generator = np.random.default_rng(0)
    samples = generator.choice(ratios, size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


@dataclass(frozen=True)
class Comparison:
    """Hold one line of the table.

    Args:
        key: its place in the JSON line, outermost name first; empty for the table alone.
        what: what is compared.
        ratio: its median and interval.
        num_pairs: rounds it comes from.
        ours_s, theirs_s: medians; None where none belong to the ratio.
        facts: what else the JSON line says of it.
    """

    key: tuple[str, ...]
    what: str
    ratio: Ratio
    num_pairs: int
    ours_s: float | None = None
    theirs_s: float | None = None
    facts: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """Return what the JSON line says."""
        return {
            "median": self.ratio.median,
            "interval": [self.ratio.low, self.ratio.high],
            "pairs": self.num_pairs,
            "ours_s": self.ours_s,
            "theirs_s": self.theirs_s,
            **(self.facts or {}),
        }


def faster(
    seconds: Seconds, ours: str, theirs: str, *, key: tuple[str, ...] = (), what: str
) -> Comparison:
    """Compare their time to ours: over 1 where ours is faster."""
    return compare(key, what, seconds[theirs] / seconds[ours], seconds[ours], seconds[theirs])


def compare(  # noqa: PLR0913 - a line of the table, in its order
    key: tuple[str, ...],
    what: str,
    ratios: np.ndarray,
    ours_s: np.ndarray,
    theirs_s: np.ndarray,
    **facts: object,
) -> Comparison:
    """Sum up the ratios of all rounds."""
    return Comparison(
        key,
        what,
        bootstrap(ratios),
        len(ratios),
        statistics.median(ours_s.tolist()),
        statistics.median(theirs_s.tolist()),
        facts,
    )


def of_bubble_bound(
    seconds: Seconds,
    ours: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    key: tuple[str, ...],
    what: str,
) -> Comparison:
    """Compare a measured speed-up to the largest that schedule and machine allow.

        speed-up  = "plain" / ours
        schedule  = K * M / (M + K - 1)       with K stages and M micro-batches
        copies    = K * "alone" / "together"  K independent copies of a stage against one
        bound     = schedule * copies / K

    Args:
        seconds: of "plain", the whole model micro-batch by micro-batch on one core; of "alone"
            and "together", one and K copies of a stage; and of ours.
    """
    speed_up = seconds["plain"] / seconds[ours]
    copies = num_stages * seconds["alone"] / seconds["together"]
    schedule = num_stages * num_micro_batches / (num_micro_batches + num_stages - 1)
    return compare(
        key,
        what,
        speed_up / (schedule * copies / num_stages),
        seconds[ours],
        seconds["plain"],
        speed_up=float(np.median(speed_up)),
        copies=float(np.median(copies)),
        schedule=schedule,
    )

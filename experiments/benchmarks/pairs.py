"""Compare two actions on a noisy machine: interleaved pairs, a bootstrap interval."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """Hold the median ratio of paired times and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


def paired_ratio(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    num_pairs: int = 48,
    warm_up: int = 3,
) -> tuple[Ratio, list[tuple[float, float]]]:
    """Time two actions in turn, in random order within each pair.

    Returns:
        the ratio ours / theirs, and the seconds of every pair.
    """
    shuffle = random.Random(0)
    pairs = []
    for number in range(num_pairs + warm_up):
        order = [0, 1]
        shuffle.shuffle(order)
        seconds = [0.0, 0.0]
        for which in order:
            start = time.perf_counter()
            (ours, theirs)[which]()
            seconds[which] = time.perf_counter() - start
        if number >= warm_up:
            pairs.append((seconds[0], seconds[1]))
    return bootstrap(np.array([a / b for a, b in pairs])), pairs


def bootstrap(ratios: np.ndarray, *, resamples: int = 10_000) -> Ratio:
    """Return the median of the ratios and the 95 % interval of resampled medians."""
    generator = np.random.default_rng(0)
    samples = generator.choice(ratios, size=(resamples, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))

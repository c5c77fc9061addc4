"""Fit a shape to measured times, which noise must not bend.

A sublayer takes a + b n seconds for n samples: a to launch it, b for each sample. With a and b at
least 0, more samples never take less time, and few never less than their share.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from operator import mul

import numpy as np

EXACT = (1.0, 1.0)
"""Quartiles of what was not measured, or once."""


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the times at ascending sizes on the line that fits all of them best.

    Deviations count relative to a time, so that the smallest size has as much to say as the
    largest. One size is left as it is.
    """
    if len(sizes) == 1 or min(seconds) <= 0:
        return tuple(seconds)
    weights = [1 / one**2 for one in seconds]
    total = sum(weights)
    mean_n = sum(map(mul, weights, sizes)) / total
    mean_s = sum(map(mul, weights, seconds)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, sizes, strict=True))
    joint = sum(
        w * (n - mean_n) * (s - mean_s) for w, n, s in zip(weights, sizes, seconds, strict=True)
    )
    slope = max(0.0, joint / spread)
    start = mean_s - slope * mean_n
    if start < 0:
        start = 0.0
        slope = sum(w * n * s for w, n, s in zip(weights, sizes, seconds, strict=True)) / sum(
            w * n**2 for w, n in zip(weights, sizes, strict=True)
        )
    return tuple(start + slope * size for size in sizes)


def quartiles(repeats_s: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of repeats, as shares of their median."""
    low_s, median_s, high_s = np.quantile(repeats_s, (0.25, 0.5, 0.75)).tolist()
    return (low_s / median_s, high_s / median_s) if median_s > 0 else EXACT


def uncertainty(rounds_s: Sequence[float]) -> float:
    """Return the standard error of the median of repeats, as a share of it; 0 for one."""
    if len(rounds_s) < 2:
        return 0.0
    # A sample's median varies 1.25 times as much as its mean does.
    error_s = 1.25 * statistics.stdev(rounds_s) / len(rounds_s) ** 0.5
    return error_s / max(statistics.median(rounds_s), 1e-9)

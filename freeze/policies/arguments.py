"""Check what policies are given, and round what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable

from freeze.policy import FreezeContext


def grown(context: FreezeContext, is_quiet: Callable[[int], bool]) -> int:
    """Return how many layers are frozen once the quiet layers above freeze, too.

    A layer without trainable weights freezes with the next layer above that has some. The last
    layer never freezes.
    """
    num_frozen = context.num_frozen
    for layer in context.layers[num_frozen:-1]:
        if layer.num_parameters and not is_quiet(layer.index):
            break
        if layer.num_parameters:
            num_frozen = layer.index + 1
    return num_frozen


def rounded_up(level: float) -> int:
    # A level that is 6 on paper may come out as 6.0000000001, which must not freeze a 7th layer.
    return math.ceil(level - 1e-6)


def checked_alpha(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; give a number between 0 and 1, e.g. 1 / 3")
    return alpha


def metric_sign(name: str, greater_is_better: bool | None) -> int:
    """Return 1 if more of a metric is better, else -1; for None, -1 if its name ends in "loss"."""
    if greater_is_better is None:
        greater_is_better = not name.endswith("loss")
    return 1 if greater_is_better else -1


def checked_count(what: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); give an int")
    if value < 0:
        raise ValueError(f"{what} is {value}; give 0 or more")
    return value

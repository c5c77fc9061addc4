"""Give the learning rate at each step, as a factor on every parameter group's own rate.

::

    factor  1 |    /------\\            a warm-up, then a curve
              |   /        \\
            0 |  /          \\___
                step ->  max_steps

A schedule depends on the step and the run's length alone. So a run that resumes, or whose pipeline
changes, keeps its rates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from pipetransformer.config.rules import WARMUP, Rule

LearningRateSchedule = Callable[[float, int], float]
"""(step, max_steps) -> factor. The step counts unscaled batches, and may be fractional."""

_FRACTION = Rule(lambda value: 0 <= value < 1, "a value in [0, 1)")


def cosine_with_warmup(warmup_fraction: float = 0.1) -> LearningRateSchedule:
    """Return a schedule that rises linearly, then falls along a half cosine to zero.

    Unlike "cosine" by name, its first step trains already: step s of w has (s + 1) / (w + 1).

    Args:
        warmup_fraction: share of the run that warms up, in [0, 1).
    Raises:
        ValueError: a value is out of range.
    """
    _FRACTION.check("warmup_fraction", warmup_fraction)

    def factor(step: float, max_steps: int) -> float:
        warmup = warmup_fraction * max_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(max_steps - warmup, 1)))

    return factor


def polynomial_with_warmup(
    power: float = 2.0, warmup_fraction: float = 0.1
) -> LearningRateSchedule:
    """Return a schedule that rises linearly, then falls as (1 - t) ** power to zero.

    A power above 1 calms the layers earlier than a cosine does, so they can freeze earlier.

    Args:
        power: at least 1.
        warmup_fraction: share of the run that warms up, in [0, 1).
    Raises:
        ValueError: a value is out of range.
    """
    if power < 1:
        raise ValueError(f"power is {power}; choose 1 or more")
    _FRACTION.check("warmup_fraction", warmup_fraction)

    def factor(step: float, max_steps: int) -> float:
        warmup = (step + 1) / (warmup_fraction * max_steps + 1)
        return float(min(warmup, (1 - min(step / max_steps, 1.0)) ** power))

    return factor


def constant(step: float, max_steps: int) -> float:
    """Keep the optimizer's learning rate."""
    return 1.0


def named_schedule(
    name: str, *, warmup: float = 0, learning_rate: float | None = None, **options: Any
) -> LearningRateSchedule:
    """Return the schedule that `transformers.get_scheduler` knows by a name.

    Args:
        name: "linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
            "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr",
            "cosine_warmup_with_min_lr" or "warmup_stable_decay".
        warmup: steps that warm up, or, below 1, their share of the run, rounded up.
        learning_rate: the optimizer's, if the lowest rate is a rate and no share: for "polynomial"
            unless lr_end=0, and for min_lr=.
        options: named as in transformers, such as num_cycles=, power= or num_decay_steps=.
    Raises:
        ValueError: the name or an option is not known, one is missing, or a value is not allowed.
    Source: the schedules of transformers 5, equal at every step (the test compares them).
    """
    if name not in _CURVES:
        follows = name in ("reduce_lr_on_plateau", "greedy")
        why = ", which follows a metric, but here the rate is a function of the step alone"
        raise ValueError(f"learning_rate_schedule is {name!r}{why * follows}; choose {_NAMES}")
    WARMUP.check("warmup", warmup)
    if name == "constant" and warmup:
        raise ValueError(
            f"warmup is {warmup}, but learning_rate_schedule='constant' has none; choose "
            "'constant_with_warmup'"
        )
    curve = _CURVES[name]
    lowest = options.get("min_lr_ratio", 0.0)
    options = _as_shares(name, options, learning_rate)
    _check_options(name, curve, options)

    def factor(step: float, max_steps: int) -> float:
        rising = math.ceil(warmup * max_steps) if isinstance(warmup, float) else warmup
        step += _STEPS_AHEAD.get(name, 0)
        if step < rising:
            return float(lowest + (1 - lowest) * step / rising)
        return float(curve(step - rising, max_steps - rising, rising, **options))

    return factor


# Curves behind the warm-up. Legend: s steps since its end, of n to the run's end, behind w.


def _constant(s: float, n: int, w: int) -> float:
    return 1.0


def _linear(s: float, n: int, w: int) -> float:
    return 1 - _progress(s, n)


def _polynomial(s: float, n: int, w: int, *, lr_end: float, power: float = 1.0) -> float:
    return lr_end + (1 - lr_end) * (1 - _progress(s, n)) ** power


def _cosine(s: float, n: int, w: int, *, num_cycles: float = 0.5) -> float:
    return 0.5 * (1 + math.cos(2 * math.pi * num_cycles * _progress(s, n)))


def _cosine_with_min_lr(
    s: float, n: int, w: int, *, min_lr_rate: float, num_cycles: float = 0.5
) -> float:
    return min_lr_rate + (1 - min_lr_rate) * _cosine(s, n, w, num_cycles=num_cycles)


def _cosine_with_restarts(s: float, n: int, w: int, *, num_cycles: int = 1) -> float:
    if s >= n:
        return 0.0
    return 0.5 * (1 + math.cos(math.pi * (num_cycles * _progress(s, n) % 1)))


def _inverse_sqrt(s: float, n: int, w: int, *, timescale: int | None = None) -> float:
    scale = timescale or w or 10_000
    return math.sqrt(scale / (s + scale))


def _warmup_stable_decay(  # noqa: PLR0913
    s: float,
    n: int,
    w: int,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    min_lr_ratio: float = 0.0,
    decay_type: str = "cosine",
) -> float:
    stable = n - num_decay_steps if num_stable_steps is None else num_stable_steps
    if s < stable:
        return 1.0
    wave = _FALLS[decay_type](_progress(s - stable, num_decay_steps))
    return min_lr_ratio + (1 - min_lr_ratio) * wave


_FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "1-sqrt": lambda t: 1 - math.sqrt(t),
}

_CURVES: Mapping[str, Callable[..., float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "constant": _constant,
    "constant_with_warmup": _constant,
    "inverse_sqrt": _inverse_sqrt,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
_NAMES = f"one of {', '.join(map(repr, _CURVES))}, or a function of (step, max_steps)"

_STEPS_AHEAD = {"cosine_warmup_with_min_lr": 1}
"""Its warm-up begins one step ahead; with the others the first step has rate 0."""

_RATES = {
    "polynomial": ("lr_end", "lr_end"),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
}
"""The option that is a rate, and the option that is the same as a share of the learning rate."""


def _progress(s: float, n: int) -> float:
    return min(1.0, s / max(1, n))


def _as_shares(
    name: str, options: Mapping[str, Any], learning_rate: float | None
) -> dict[str, Any]:
    """Turn a lowest rate that is given as a rate into its share of the learning rate."""
    shares = {"lr_end": 1e-7, **options} if name == "polynomial" else dict(options)
    given, share = _RATES.get(name, ("", ""))
    if given not in shares:
        return shares
    rate = shares.pop(given)
    if share in shares:
        raise ValueError(f"{given} and {share} are both given; choose one of them")
    if rate and (learning_rate is None or rate >= learning_rate):
        raise ValueError(
            f"{given} of {name!r} is {rate}, and the learning_rate {learning_rate}; give the "
            f"optimizer's as learning_rate=, and a {given} below it"
        )
    return {**shares, share: rate / learning_rate if rate and learning_rate else 0.0}


def _check_options(name: str, curve: Callable[..., float], options: Mapping[str, Any]) -> None:
    """Refuse options that the curve does not have, and the lack of one."""
    parameters = inspect.signature(curve).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    needed = [n for n, p in known.items() if p.default is p.empty and n not in options]
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(
            f"{name!r} has no option {', '.join(unknown)}; choose of {', '.join(known) or 'none'}"
        )
    if needed:
        raise ValueError(
            f"the schedule {name!r} needs {', '.join(needed)}; give learning_rate_schedule="
            f"named_schedule({name!r}, {needed[0]}=...)"
        )
    if (fall := options.get("decay_type", "linear")) not in _FALLS:
        raise ValueError(f"decay_type is {fall!r}; choose one of {', '.join(map(repr, _FALLS))}")

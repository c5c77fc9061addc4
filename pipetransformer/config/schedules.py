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

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pipetransformer.config.rules import WARMUP, Rule
from pipetransformer.extras import require

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


def constant(step: float, max_steps: int) -> float:
    """Keep the optimizer's learning rate."""
    return 1.0


def named_schedule(
    name: str, *, warmup: float = 0, learning_rate: float | None = None, **options: Any
) -> LearningRateSchedule:
    """Return the schedule that `transformers.get_scheduler` makes by a name.

    Args:
        name: "linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
            "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr",
            "cosine_warmup_with_min_lr" or "warmup_stable_decay".
        warmup: steps that warm up, or, below 1, their share of the run, rounded up.
        learning_rate: the optimizer's, if the lowest rate is a rate and no share: for "polynomial"
            unless lr_end=0, and for min_lr=.
        options: named as in transformers, such as num_cycles=, power= or num_decay_steps=.
    Raises:
        ImportError: transformers is not installed.
        ValueError: the name or an option is not known, one is missing, or a value is not allowed.
    """
    require("transformers", purpose=f"learning_rate_schedule={name!r}")
    # It takes seconds, which runs without such a name do without.
    from transformers import SchedulerType, get_scheduler

    names = [str(kind.value) for kind in SchedulerType if kind.value not in _OF_A_METRIC]
    if name not in names:
        why = ", which follows a metric, but here the rate is a function of the step alone"
        raise ValueError(
            f"learning_rate_schedule is {name!r}{why * (name in _OF_A_METRIC)}; choose one of "
            f"{', '.join(map(repr, names))}, or a function of (step, max_steps)"
        )
    WARMUP.check("warmup", warmup)
    if name == "constant" and warmup:
        raise ValueError(
            f"warmup is {warmup}, but learning_rate_schedule='constant' has none; choose "
            "'constant_with_warmup'"
        )
    lowest = "lr_end" if name == "polynomial" else "min_lr"
    rate = options.get(lowest, 1e-7 if name == "polynomial" else None)
    if rate and (learning_rate is None or rate >= learning_rate):
        raise ValueError(
            f"{lowest} of {name!r} is {rate}, and the learning_rate {learning_rate}; give the "
            f"optimizer's as learning_rate=, and a {lowest} below it"
        )

    @cache  # A run's number of steps seldom changes.
    def curve(max_steps: int) -> Callable[[float], float]:
        rising = math.ceil(warmup * max_steps) if isinstance(warmup, float) else warmup
        # It is asked for the factor alone, so that its optimizer trains nothing.
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate or 1.0)
        made: Any = get_scheduler(name, optimizer, rising, max_steps, dict(options))
        factor: Callable[[float], float] = made.lr_lambdas[0]
        return factor

    try:
        curve(1)(0)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"transformers makes no schedule {name!r} with {options}: {error}; give "
            f"learning_rate_schedule=named_schedule({name!r}, ...) options of its get_scheduler"
        ) from error
    return lambda step, max_steps: float(curve(max_steps)(step))


_OF_A_METRIC = ("reduce_lr_on_plateau", "greedy")

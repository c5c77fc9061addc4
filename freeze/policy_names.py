"""Turn what may be said of freezing into a policy: a number, numbers by epoch, a word."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from freeze.policies import (
    AlphaSchedule,
    AutoFreeze,
    FreezeSchedule,
    Guarded,
    Linear,
    PaperRule,
    Plasticity,
    QuietUpdates,
    Replay,
    TimeBudget,
)
from freeze.policy import (
    MEASURED_SIGNALS,
    FreezePolicy,
    NeverFreeze,
    PolicyFunction,
    as_policy,
)

FreezeChoice: TypeAlias = int | Sequence[int] | str | FreezePolicy | PolicyFunction
"""A number of blocks, one for each epoch, a policy's name, a policy, or a function."""

POLICY_HELP = (
    "none, budget[:0.5], paper:1/3, alpha:1/3, schedule:0,0,4,8, linear[:0.1,0.8], auto[:50], "
    "plasticity[:0.2], cka[:0.2], quiet[:1e-5], replay:FOLDER or module:policy; "
    "guarded:4,POLICY keeps so many layers from freezing, paced:3,POLICY takes one at a time, "
    "wanted at so many decisions in a row"
)


def chosen_policy(
    freeze: FreezeChoice | None, measured: frozenset[str] = MEASURED_SIGNALS
) -> FreezePolicy:
    """Turn numbers and names into a policy, too, beside what `as_policy` takes and raises."""
    if isinstance(freeze, (int, Sequence)):
        try:
            if isinstance(freeze, str):
                freeze = named_policy(freeze)
            else:
                freeze = FreezeSchedule([freeze] if isinstance(freeze, int) else freeze)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"freeze is {freeze!r}; give a number of blocks, or one for each epoch, a policy, "
                f"a function of a FreezeContext, or a policy's name: {error}"
            ) from error
    return as_policy(freeze, measured)


def named_policy(text: str) -> FreezePolicy:
    """Return the policy that a text names; see POLICY_HELP.

    "module:policy" runs a module, also one of the working folder. It takes a policy from it, a
    class of policies without arguments, or a function.

    Raises:
        ValueError: it names none.
    """
    kind, _, value = text.partition(":")
    try:
        if kind in _NAMED:
            return _NAMED[kind](value)
        return _imported(kind, value)
    except (ImportError, AttributeError, ValueError, TypeError, ZeroDivisionError) as error:
        near = difflib.get_close_matches(kind, _NAMED, n=1)
        if near and isinstance(error, ModuleNotFoundError):
            meant = text.replace(kind, near[0], 1)
            raise ValueError(
                f"{text!r} names no freeze policy; did you mean {meant!r}?"
            ) from error
        raise ValueError(
            f"{text!r} names no freeze policy ({error}); give {POLICY_HELP}"
        ) from error


def _imported(module: str, name: str) -> FreezePolicy:
    folder = os.getcwd()  # A console script does not look there.
    sys.path.insert(0, folder)
    try:
        part = getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove(folder)
    return as_policy(part() if isinstance(part, type) else part)


def _never(value: str) -> FreezePolicy:
    if value:
        raise ValueError("none takes no argument")
    return NeverFreeze()


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number of layers") from None


def _linear(value: str) -> FreezePolicy:
    if not value:
        return Linear()
    begin, end = (float(one) for one in value.split(","))
    return Linear(begin=begin, end=end)


def _guarded(value: str) -> FreezePolicy:
    min_active, _, policy = value.partition(",")
    return Guarded(named_policy(policy), min_active=int(min_active))


def _paced(value: str) -> FreezePolicy:
    patience, _, policy = value.partition(",")
    return Guarded(named_policy(policy), patience=int(patience), at_once=1)


def _optional(build: Callable[..., FreezePolicy], **fixed: Any) -> Callable[[str], FreezePolicy]:
    """Return a function that builds a policy from a number, or without one."""
    return lambda value: build(*([float(Fraction(value))] if value else []), **fixed)


_NAMED: Mapping[str, Callable[[str], FreezePolicy]] = {
    "none": _never,
    "budget": _optional(TimeBudget),
    "paper": lambda value: PaperRule(float(Fraction(value))),
    "alpha": lambda value: AlphaSchedule(float(Fraction(value))),
    "schedule": lambda value: FreezeSchedule([_whole(one) for one in value.split(",")]),
    "linear": _linear,
    "auto": _optional(AutoFreeze),
    "plasticity": _optional(Plasticity),
    "cka": _optional(Plasticity, measure="cka"),
    "quiet": _optional(QuietUpdates),
    "guarded": _guarded,
    "paced": _paced,
    "replay": Replay,
}

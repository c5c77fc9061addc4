"""Turn what may be said of freezing into a policy: a number, numbers by epoch, a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from freeze.policies import FreezeSchedule
from freeze.policy import FreezePolicy, PolicyFunction
from freeze.policy_names import POLICY_HELP, named_policy

FreezeChoice: TypeAlias = int | Sequence[int] | str | FreezePolicy | PolicyFunction
"""A number of blocks, one for each epoch, a policy's name, a policy, or a function."""


def chosen_policy(freeze: FreezeChoice) -> FreezePolicy | PolicyFunction:
    """Return the policy that was chosen, or a function that is one.

    Raises:
        ValueError: it is none of what may be chosen.
    """
    choices = (
        f"freeze is {freeze!r}; give a number of blocks, or one for each epoch, a policy, a "
        "function of a FreezeContext, or a policy's name: "
    )
    refusal = f"{choices}{POLICY_HELP}"
    if isinstance(freeze, str):
        try:
            return named_policy(freeze)
        except ValueError as error:  # It lists the names, or the one that was meant.
            raise ValueError(f"{choices}{error}") from error
    try:
        if isinstance(freeze, FreezePolicy):
            return freeze
        if isinstance(freeze, (int, Sequence)):
            numbers: list[Any] = [freeze] if isinstance(freeze, int) else [*freeze]
            return FreezeSchedule(numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{refusal} ({error})") from error
    if isinstance(freeze, type) or not callable(freeze):
        raise ValueError(refusal)
    return freeze

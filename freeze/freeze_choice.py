"""Turn what may be said of freezing into a policy: a number, numbers by epoch, a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from freeze.policies import FreezeSchedule
from freeze.policy import MEASURED_SIGNALS, FreezePolicy, PolicyFunction, as_policy
from freeze.policy_names import named_policy

FreezeChoice: TypeAlias = int | Sequence[int] | str | FreezePolicy | PolicyFunction
"""A number of blocks, one for each epoch, a policy's name, a policy, or a function."""


def chosen_policy(
    freeze: FreezeChoice | None, measured: frozenset[str] = MEASURED_SIGNALS
) -> FreezePolicy:
    """Turn numbers and names into a policy, too, beside what `as_policy` takes.

    Raises:
        TypeError, ValueError: it is none of what may be chosen; see `as_policy`, too.
    """
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

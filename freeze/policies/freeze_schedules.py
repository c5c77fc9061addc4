"""Freeze by a plan made beforehand: by epoch, by a closed form, or evenly.

Legend: L layers can freeze; T = 1, 2, ... counts decisions; L_f(T) is the real-valued number of
frozen layers after decision T, rounded up only when it is applied.

    closed form, L = 12    T   1  2  3  4  5  6  7
    alpha = 1/2                6  9 11 12 12 12 12
    alpha = 1/3                4  7  9 10 11 11 12

Source of the closed form: PipeTransformer (ICML 2021), section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from freeze.policies.arguments import checked_alpha, checked_count, rounded_up
from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class FreezeSchedule(FreezePolicy):
    """Freeze an explicit number of layers per epoch; a smaller number later thaws.

    Args:
        frozen_at: a sequence by epoch, whose last entry stays; or a mapping from the epochs at
            which the number changes, with 0 before the first.
    Raises:
        TypeError: an epoch or a number is not an int.
        ValueError: the schedule is empty, or an epoch or a number is negative.
    Source: PipeTransformer's published program, which freezes by a fixed schedule.
    """

    def __init__(self, frozen_at: Mapping[int, int] | Sequence[int]) -> None:
        pairs = frozen_at.items() if isinstance(frozen_at, Mapping) else enumerate(frozen_at)
        changes = {
            checked_count("an epoch of the freeze schedule", epoch): checked_count(
                "a number of frozen layers in the freeze schedule", num_frozen
            )
            for epoch, num_frozen in pairs
        }
        if not changes:
            raise ValueError(
                f"the freeze schedule is {frozen_at!r}, which is empty; give the number of frozen "
                "layers per epoch, e.g. [0, 4, 6], or freeze=None to freeze nothing"
            )
        self._num_frozen_at = {0: 0} | changes

    def check(self, num_layers: int) -> None:
        largest = max(self._num_frozen_at.values())
        if largest > num_layers:
            raise ValueError(
                f"the freeze schedule freezes up to {largest} layers, but {num_layers} "
                f"layers can freeze; give numbers in 0..{num_layers}"
            )

    def decide(self, context: FreezeContext) -> FreezeDecision:
        # Not every caller checks: an error at the first call is better than one in mid-training.
        self.check(context.num_layers)
        return FreezeDecision(self.at(context.epoch), f"schedule of epoch {context.epoch}")

    def at(self, epoch: int) -> int:
        return self._num_frozen_at[max(begin for begin in self._num_frozen_at if begin <= epoch)]


@final
class AlphaSchedule(FreezePolicy):
    """Freeze by epoch as the paper's rule does when the gradients never hold it back.

    L_f(T) = L * (1 - (1 - alpha)^T), where T is the epoch, from 0.

    Args:
        alpha: share of the active layers that freezes per epoch, between 0 and 1, exclusive.
    Raises:
        ValueError: alpha is out of its range.
    """

    def __init__(self, alpha: float) -> None:
        self._alpha = checked_alpha(alpha)

    def decide(self, context: FreezeContext) -> FreezeDecision:
        level = context.num_layers * (1 - (1 - self._alpha) ** context.epoch)
        return FreezeDecision(
            rounded_up(level), f"closed form: L_f({context.epoch}) = {level:.3f}"
        )


@final
class Linear(FreezePolicy):
    """Freeze layers one after the other, at equal distances over a part of the run.

    Args:
        begin, end: shares of the run, 0 <= begin < end <= 1, at which the first layer and the
            last but one freeze. The last one stays active.
    Raises:
        ValueError: an argument is out of its range.
    Source: FreezeOut's times (2017), not cubed; `end` is ours, and learning rates stay the run's.
    """

    def __init__(self, *, begin: float = 0.1, end: float = 0.8) -> None:
        if not 0 <= begin < end <= 1:
            raise ValueError(f"begin is {begin} and end {end}; give shares, 0 <= begin < end <= 1")
        self._begin, self._end = begin, end

    def decide(self, context: FreezeContext) -> FreezeDecision:
        most = context.num_layers - 1
        done = context.step / context.max_steps
        share = (done - self._begin) / (self._end - self._begin)
        # From 1 layer at `begin` to `most` at `end`; the 1e-6 below is for rounding errors.
        level = 1 + share * (most - 1) if share >= 0 and most else 0
        return FreezeDecision(int(min(level + 1e-6, most)), f"linear, at {done:.0%} of the run")

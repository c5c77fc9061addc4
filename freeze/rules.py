"""Ship the freeze rules: schedules, the paper's rule, and its closed form.

Legend: L layers can freeze; T = 1, 2, ... counts decisions; L_f(T) is the real-valued number of
frozen layers after decision T, and is rounded up only when it is applied.

    closed form, L = 12    T   1  2  3  4  5  6  7
    alpha = 1/2                6  9 11 12 12 12 12
    alpha = 1/3                4  7  9 10 11 11 12

Source: PipeTransformer (ICML 2021), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from freeze.policy import FreezeContext, FreezeDecision, FreezePolicy


@final
class FreezeSchedule(FreezePolicy):
    """Freeze an explicit number of layers per epoch; a smaller number later thaws.

    Args:
        frozen_at: a sequence indexed by epoch, whose last entry holds on, or a mapping from the
            epochs at which the number changes (before the first one nothing is frozen).
    Raises:
        TypeError: an epoch or a number is not an int.
        ValueError: the schedule is empty, or an epoch or a number is negative.
    """

    def __init__(self, frozen_at: Mapping[int, int] | Sequence[int]) -> None:
        pairs = frozen_at.items() if isinstance(frozen_at, Mapping) else enumerate(frozen_at)
        changes = {
            _checked_count("an epoch of the freeze schedule", epoch): _checked_count(
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

    def decide(self, context: FreezeContext) -> FreezeDecision:
        # Said at the first call, not in the middle of the training.
        largest = max(self._num_frozen_at.values())
        if largest > context.num_layers:
            raise ValueError(
                f"the freeze schedule freezes up to {largest} layers, but {context.num_layers} "
                f"layers can freeze; give numbers in 0..{context.num_layers}"
            )
        return FreezeDecision(self.at(context.epoch), f"schedule of epoch {context.epoch}")

    def at(self, epoch: int) -> int:
        """Return the frozen layers of an epoch."""
        return self._num_frozen_at[max(begin for begin in self._num_frozen_at if begin <= epoch)]


@final
class AlphaSchedule(FreezePolicy):
    """Freeze by epoch as the paper's rule does when the gradients never hold it back.

    L_f(T) = L * (1 - (1 - alpha)^T), with T = epoch - start_epoch + 1. A function of the epoch
    alone.

    Args:
        alpha: share of the active layers that freezes per epoch, between 0 and 1, exclusive.
        start_epoch: the first epoch with frozen layers.
        max_frozen: largest number of frozen layers; None allows all of them.
    Raises:
        TypeError: `start_epoch` or `max_frozen` is not an int.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, alpha: float, *, start_epoch: int = 1, max_frozen: int | None = None
    ) -> None:
        self._alpha = _checked_alpha(alpha)
        self._start_epoch = _checked_count("start_epoch", start_epoch)
        self._max_frozen = _checked_limit(max_frozen)

    def decide(self, context: FreezeContext) -> FreezeDecision:
        num_decisions = max(0, context.epoch - self._start_epoch + 1)
        level = context.num_layers * (1 - (1 - self._alpha) ** num_decisions)
        num_frozen = _rounded_up(min(level, self._max_frozen))
        return FreezeDecision(num_frozen, f"closed form: L_f({num_decisions}) = {level:.3f}")


@final
class Linear(FreezePolicy):
    """Freeze layers one after the other, at equal distances over a part of the run.

    Args:
        begin, end: shares of the run, 0 <= begin < end <= 1: when the first layer freezes, and by
            when `max_frozen` are frozen.
        max_frozen: layers frozen at the end; None leaves the last layer active.
    Raises:
        TypeError: `max_frozen` is not an int.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, *, begin: float = 0.1, end: float = 0.8, max_frozen: int | None = None
    ) -> None:
        if not 0 <= begin < end <= 1:
            raise ValueError(f"begin is {begin} and end {end}; give shares, 0 <= begin < end <= 1")
        self._begin, self._end = begin, end
        self._max_frozen = None if max_frozen is None else _checked_limit(max_frozen)

    def decide(self, context: FreezeContext) -> FreezeDecision:
        most = context.num_layers - 1 if self._max_frozen is None else self._max_frozen
        most = min(most, context.num_layers)
        done = context.step / context.max_steps
        share = (done - self._begin) / (self._end - self._begin)
        # The first layer freezes at `begin`, the last one at `end`.
        level = 1 + share * (most - 1) if share >= 0 and most else 0
        return FreezeDecision(int(min(level + 1e-6, most)), f"linear, at {done:.0%} of the run")


@final
class PaperRule(FreezePolicy):
    """Freeze by the paper's rule: a share of the active layers, held back by the gradients.

    L_f(T) = min(L_f(T-1) + alpha * (L - L_f(T-1)), argmin_l ||g_l(T)||), L_f(0) = 0, where g_l
    is layer l's gradient and l runs over the active layers, numbered from 0: the layers below the
    one with the smallest gradient may freeze, that one itself not yet. So the last layer never
    freezes. Of equal gradients the lowest layer counts, and layers without parameters do not.
    It never thaws. Each call at step >= 1 is one decision T.

    If something else changed what is frozen since the last decision (a thaw, say), L_f starts
    anew from that.

    Args:
        alpha: share of the active layers that may freeze per decision, between 0 and 1, exclusive.
        max_frozen: largest number of frozen layers; None sets no limit of its own.
    Raises:
        TypeError: `max_frozen` is not an int.
        ValueError: an argument is out of its range.
    Source: PipeTransformer section 3.1; `max_frozen` is ours.
    """

    signals = frozenset({"gradient_norm"})

    def __init__(self, alpha: float, *, max_frozen: int | None = None) -> None:
        self._alpha = _checked_alpha(alpha)
        self._max_frozen = _checked_limit(max_frozen)
        self._level = 0.0
        self._num_decisions = 0

    def decide(self, context: FreezeContext) -> FreezeDecision | None:
        """Take decision T; at step 0 there is none.

        Raises:
            ValueError: the gradient norm of some active layers is missing or not finite.
        """
        if context.step == 0:
            return None
        norms = _active_norms(context)
        if not norms:
            return FreezeDecision(context.num_frozen, "no active layer has a measured gradient")
        unchanged = _rounded_up(self._level) == context.num_frozen
        before = self._level if unchanged else float(context.num_frozen)
        quietest = min(norms, key=norms.__getitem__)
        grown = before + self._alpha * (context.num_layers - before)
        self._level = max(before, min(grown, quietest, self._max_frozen))
        self._num_decisions += 1
        return FreezeDecision(
            _rounded_up(self._level),
            f"paper's rule: L_f({self._num_decisions}) = {self._level:.3f} of at most "
            f"{grown:.3f}, smallest gradient at layer {quietest}",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"level": self._level, "num_decisions": self._num_decisions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"level", "num_decisions"}:
            raise ValueError(
                f"{self.name} was given a state with the keys {sorted(state)}, not "
                "['level', 'num_decisions']; resume with the policy that wrote the checkpoint"
            )
        self._level = float(state["level"])
        self._num_decisions = int(state["num_decisions"])


def _active_norms(context: FreezeContext) -> dict[int, float]:
    """Map each active layer with parameters to its gradient norm; {} if none was measured."""
    active = [layer for layer in context.layers[context.num_frozen :] if layer.num_parameters]
    norms = {layer.index: layer.gradient_norm for layer in active}
    if not any(norm is not None for norm in norms.values()):
        return {}
    finite = {i: norm for i, norm in norms.items() if norm is not None and math.isfinite(norm)}
    if bad := {i: norm for i, norm in norms.items() if i not in finite}:
        raise ValueError(
            f"the paper's rule compares the gradient norms of all active layers, but at step "
            f"{context.step} those of these layers are missing or not finite: {bad}; measure all "
            "of them over the steps with finite gradients"
        )
    return finite


def _rounded_up(level: float) -> int:
    # A sum of products that is 6 on paper may come out as 6.0000000001: no seventh layer for that.
    return math.ceil(level - 1e-6)


def _checked_alpha(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; give a number between 0 and 1, e.g. 1 / 3")
    return alpha


def _checked_limit(max_frozen: int | None) -> float:
    return math.inf if max_frozen is None else _checked_count("max_frozen", max_frozen)


def _checked_count(what: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is {value!r} ({type(value).__name__}); give an int")
    if value < 0:
        raise ValueError(f"{what} is {value}; give 0 or more")
    return value

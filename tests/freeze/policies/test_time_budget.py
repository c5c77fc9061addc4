"""Prove that a budget of time is kept, whatever steps take and whenever it is asked."""

from __future__ import annotations

import dataclasses

import pytest

from freeze import FreezeContext, FreezePolicy, TimeBudget, checked_decision, named_policy
from tests.helpers.freezing import make_context

LAYERS, STEPS, PER_EPOCH = 12, 800, 100


def context_at(step: int, num_frozen: int, layer_s: float = 3.0) -> FreezeContext:
    """Build a context in which each of 12 layers takes as long in a step, cached ones nothing."""
    return dataclasses.replace(
        make_context([1.0] * LAYERS, epoch=step // PER_EPOCH, num_frozen=num_frozen),
        step=step,
        max_steps=STEPS,
        steps_per_epoch=PER_EPOCH,
        predict=lambda frozen: layer_s * (LAYERS - frozen),
    )


def frozen_by_step(policy: FreezePolicy, *, every: int = 1) -> list[int]:
    """Return what is frozen in each step of a run that asks every few steps."""
    frozen = [0]
    for step in range(STEPS):
        if step % every == 0:
            frozen.append(checked_decision(policy, context_at(step, frozen[-1])).num_frozen)
        else:
            frozen.append(frozen[-1])
    return frozen[1:]


def share_of_time(frozen: list[int]) -> float:
    """Return what a run takes of an unfrozen one, a pass forward to fill the cache included."""
    fill = max(frozen) / 3 * PER_EPOCH
    return (sum(LAYERS - one for one in frozen) + fill) / (LAYERS * STEPS)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_the_run_takes_the_share_that_was_asked_for(share: float) -> None:
    frozen = frozen_by_step(TimeBudget(share))
    assert share_of_time(frozen) == pytest.approx(share, abs=1 / STEPS)
    assert set(frozen) == {0, 10}
    assert frozen == sorted(frozen)


def test_a_coarser_interval_misses_by_less_than_itself() -> None:
    frozen = frozen_by_step(TimeBudget(0.5), every=50)
    assert 0.5 <= share_of_time(frozen) < 0.5 + 50 / STEPS


def test_active_says_which_share_of_the_layers_never_freezes() -> None:
    assert max(frozen_by_step(TimeBudget(0.5, active=1 / 3))) == 8
    assert max(frozen_by_step(TimeBudget(0.5, active=0.01))) == 11


def test_nothing_freezes_where_nothing_is_to_be_saved() -> None:
    assert max(frozen_by_step(TimeBudget(1))) == 0
    assert max(frozen_by_step(TimeBudget(0.5, active=1))) == 0
    free = dataclasses.replace(context_at(700, 0), predict=lambda frozen: 1.0)
    assert checked_decision(TimeBudget(0.5), free).num_frozen == 0


def test_a_budget_that_cannot_be_kept_freezes_at_once_and_says_what_can() -> None:
    decision = checked_decision(TimeBudget(0.1), context_at(1, 0))
    assert decision.num_frozen == 10
    # Two layers of twelve for all steps, and a pass forward through ten in the first epoch.
    assert decision.reason == (
        "for 0.1 of the unfrozen time; 0.20 is the least that this can reach"
    )


def test_a_resumed_run_goes_on_with_what_is_frozen() -> None:
    policy = TimeBudget(0.5)
    assert policy.state_dict() == {}
    assert checked_decision(policy, context_at(799, 10)).reason == "keep"


def test_the_word_budget_names_it() -> None:
    assert frozen_by_step(named_policy("budget")) == frozen_by_step(TimeBudget(0.5))
    assert frozen_by_step(named_policy("budget:0.7")) == frozen_by_step(TimeBudget(0.7))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="give a share of the time, above 0 and up to 1"):
        TimeBudget(share)


@pytest.mark.parametrize("active", [0.0, 2.0])
def test_a_share_of_layers_that_is_none_is_refused(active: float) -> None:
    with pytest.raises(ValueError, match="give a share of the layers, above 0, up to 1"):
        TimeBudget(active=active)

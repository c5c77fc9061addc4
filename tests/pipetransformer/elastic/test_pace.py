"""Prove what of a step counts where plans are compared, and what only happens once."""

from __future__ import annotations

from typing import Any

import pytest

from autocache import CacheStats
from autopipe.plan.request import PipelinePlan
from pipetransformer.elastic.costs import REVIEW_STEPS, Pace, SteadyStep, steady_step

# Of 10 s, 4 s were spent on getting samples.
TOOK = {"data": 4.0, "compute": 5.0, "other": 1.0}
PLAN = PipelinePlan(1, (1, 4), 1, "1f1b", predicted_step_s=8.0, peak_bytes=(0,), fetch_s=2.0)
NO_LAYERS = CacheStats(hits=8, seconds=1.0)
ALL_LAYERS = CacheStats(misses=8, seconds=3.0)


def steady(stats: CacheStats, **told: Any) -> SteadyStep:
    settings = {"uses_cache": True, "has_workers": True, "on_cpu": True}
    return steady_step(TOOK, stats, PLAN, **{**settings, **told})


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("has_workers", [True, False])
def test_reading_rows_counts_and_loading_those_that_are_checked_does_not(
    has_workers: bool, on_cpu: bool
) -> None:
    assert steady(NO_LAYERS, has_workers=has_workers, on_cpu=on_cpu) == SteadyStep(7.0, 1.0)


def test_while_a_cache_fills_fetching_counts_as_it_is_predicted_to_become() -> None:
    assert steady(ALL_LAYERS) == SteadyStep(6.0 + 2.0, 2.0)
    assert steady(CacheStats(hits=7, upgrades=1)) == SteadyStep(6.0 + 2.0, 2.0)
    # Layers that a GPU computes while it is waited for cannot be told from those that train.
    assert steady(ALL_LAYERS, on_cpu=False) == SteadyStep(8.0, 2.0)


def test_a_prefix_that_is_computed_in_every_step_counts_and_waiting_for_workers_does_not() -> None:
    assert steady(ALL_LAYERS, uses_cache=False) == SteadyStep(6.0 + 3.0, 3.0)
    # Launched on a GPU, it has a part of all as large as predicted.
    assert steady(ALL_LAYERS, uses_cache=False, on_cpu=False) == SteadyStep(9.0, 9.0 / 4)


def test_reading_the_data_set_counts_where_no_worker_does_it() -> None:
    assert steady(CacheStats(), uses_cache=False) == SteadyStep(6.0, 0.0)
    assert steady(CacheStats(), uses_cache=False, has_workers=False) == SteadyStep(10.0, 4.0)


def test_the_pace_is_of_whole_steps_and_knows_what_of_them_trains() -> None:
    pace = Pace()
    for number in range(REVIEW_STEPS):
        assert pace.training_s is None
        pace.note(SteadyStep(5.0 + number % 2, 2.0), 1.0)
    assert (pace.median_s, pace.training_s) == (5.5, 3.5)

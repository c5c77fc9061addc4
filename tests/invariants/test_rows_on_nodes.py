"""On several nodes a later epoch finds every row on the node that needs it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from autodp.sampler import shuffled
from tests.helpers.marks import slow
from tests.helpers.models import NUM_SAMPLES
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    merge,
    train,
)

ONE_SLOT = Scenario({0: Shape(1, 2)}, (2,), slots_per_node=1)
TWO_SLOTS = Scenario({0: Shape(2, 3), 7: Shape(1, 2), 11: Shape(2, 2)}, (2,), slots_per_node=2)
# The last batch of an epoch has 2 samples; each is a micro-batch, and goes to another replica.
WHOLE_UNITS = dataclasses.replace(
    TWO_SLOTS, settings={"micro_batch_size": 1, "global_batch_size": 8}
)


def run(pool: Pool, scenario: Scenario, **settings: Any) -> tuple[Outcome, int]:
    """Return what came of it, and the hits of all ranks."""
    # Larger chunks are filled with samples of steps to come, which hit in the first epoch.
    settings = {"prefix_chunk": 1, **scenario.settings, **settings}
    outcome = merge(pool.run(train, dataclasses.replace(scenario, settings=settings)))
    return outcome, outcome.extra["hits"]


def in_another_order(epoch: int) -> Tensor:
    return shuffled(NUM_SAMPLES, seed=5)(epoch)


def test_a_second_and_a_third_epoch_of_two_nodes_hit_every_row(two_ranks: Pool) -> None:
    cached, hits = run(two_ranks, ONE_SLOT)
    assert hits == 2 * NUM_SAMPLES
    assert_equal(cached, plain(ONE_SLOT))
    _, fewer = run(two_ranks, ONE_SLOT, sample_order=in_another_order)
    assert fewer < 2 * NUM_SAMPLES


@pytest.mark.parametrize("scenario", [slow(TWO_SLOTS), slow(WHOLE_UNITS)], ids=["even", "units"])
def test_rows_are_found_whatever_the_pipelines_and_change_no_bit(
    four_ranks: Pool, scenario: Scenario
) -> None:
    cached, hits = run(four_ranks, scenario)
    assert hits == 2 * NUM_SAMPLES
    computed, none = run(four_ranks, scenario, cache=False)
    assert none == 0
    assert_same_bits(cached, computed)
    assert_equal(cached, plain(scenario))

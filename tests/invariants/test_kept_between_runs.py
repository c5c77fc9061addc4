"""A run over rows that another run has kept comes to the numbers of a run without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autocache import RowSets
from tests.helpers.marks import slow
from tests.helpers.pool import Pool
from tests.helpers.scenario import Outcome, Scenario, Shape, assert_same_bits, merge, train

ALONE = Scenario({0: Shape(1, 2)}, frozen=(0, 1, 2, 1))
SHRINKING = Scenario({0: Shape(2, 3), 4: Shape(1, 2), 9: Shape(2, 3)}, frozen=(1, 2, 1))


def run(pool: Pool | None, scenario: Scenario, **settings: Any) -> tuple[Outcome, int]:
    """Return what came of it in a pool or in this process, and the hits of all ranks."""
    scenario = dataclasses.replace(
        scenario, settings={**scenario.settings, "prefix_chunk": 4, **settings}
    )
    outcomes = [train(scenario)] if pool is None else pool.run(train, scenario)
    return merge(outcomes), sum(one.extra["hits"] for one in outcomes)


def kept(folder: Path, **settings: Any) -> Mapping[str, Any]:
    return {"cache_folder": folder, "cache_keep": True, **settings}


NODES = dataclasses.replace(SHRINKING, slots_per_node=1)


@pytest.mark.parametrize(
    ("num_ranks", "scenario"), [slow(1, ALONE), (2, SHRINKING), slow(2, NODES)]
)
def test_first_and_second_run_equal_a_run_without_a_cache_bit_by_bit(
    two_ranks: Pool, num_ranks: int, scenario: Scenario, tmp_path: Path
) -> None:
    pool = two_ranks if num_ranks == 2 else None
    computed, _ = run(pool, scenario, cache=False)
    first, few = run(pool, scenario, **kept(tmp_path))
    second, more = run(pool, scenario, **kept(tmp_path))
    assert_same_bits(first, computed)
    assert_same_bits(second, computed)
    # What had frozen before the first step is the same in both runs; what trained first, too.
    assert more > few > 0


def test_a_limit_holds_a_part_of_the_rows_and_changes_no_number(
    two_ranks: Pool, tmp_path: Path
) -> None:
    computed, _ = run(two_ranks, SHRINKING, cache=False)
    limited, hits = run(two_ranks, SHRINKING, **kept(tmp_path, cache_limit_bytes=6000))
    assert_same_bits(limited, computed)
    assert hits > 0
    assert sum(one.stat().st_size for one in tmp_path.rglob("rows")) <= 6000


@pytest.mark.parametrize("slots_per_node", [None, 1])
def test_all_ranks_of_a_run_write_its_rows(
    two_ranks: Pool, slots_per_node: int | None, tmp_path: Path
) -> None:
    # Four steps of the first epoch: no sample is computed twice, and each rank has half of them.
    settings = kept(tmp_path, prefix_chunk=1)
    scenario = Scenario({0: Shape(1, 2)}, (2,), settings=settings, slots_per_node=slots_per_node)
    two_ranks.run(train, scenario, 4)
    (facts,) = RowSets(tmp_path).facts()
    assert facts.num_whole == 4 * scenario.options["global_batch_size"]

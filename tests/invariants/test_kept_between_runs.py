"""A run over rows that another run has kept comes to the numbers of a run without a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forced import train_quickly
from tests.helpers.pool import Pool
from tests.helpers.scenario import Outcome, Scenario, Shape, assert_same_bits, merge

ALONE = Scenario({0: Shape(1, 2)}, frozen=(0, 1, 2, 1))
SHRINKING = Scenario({0: Shape(2, 3), 4: Shape(1, 2), 9: Shape(2, 3)}, frozen=(1, 2, 1))


def run(pool: Pool, scenario: Scenario, **settings: Any) -> tuple[Outcome, int]:
    """Return what came of it, and the hits of all ranks."""
    scenario = dataclasses.replace(
        scenario, settings={**scenario.settings, "prefix_chunk": 4, **settings}
    )
    outcomes = pool.run(train_quickly, scenario)
    return merge(outcomes), sum(one.extra["hits"] for one in outcomes)


def kept(folder: Path, **settings: Any) -> Mapping[str, Any]:
    return {"cache_folder": folder, "cache_keep": True, **settings}


NODES = dataclasses.replace(SHRINKING, slots_per_node=1)


@pytest.mark.parametrize(("num_ranks", "scenario"), [(1, ALONE), (2, SHRINKING), (2, NODES)])
def test_first_and_second_run_equal_a_run_without_a_cache_bit_by_bit(
    num_ranks: int, scenario: Scenario, tmp_path: Path
) -> None:
    pool = Pool(num_ranks)
    try:
        computed, _ = run(pool, scenario, cache=False)
        first, few = run(pool, scenario, **kept(tmp_path))
        second, more = run(pool, scenario, **kept(tmp_path))
    finally:
        pool.close()
    assert_same_bits(first, computed)
    assert_same_bits(second, computed)
    # What had frozen before the first step is the same in both runs; what trained first, too.
    assert more > few > 0


def test_a_limit_holds_a_part_of_the_rows_and_changes_no_number(tmp_path: Path) -> None:
    pool = Pool(2)
    try:
        computed, _ = run(pool, SHRINKING, cache=False)
        limited, hits = run(pool, SHRINKING, **kept(tmp_path, cache_limit_bytes=6000))
    finally:
        pool.close()
    assert_same_bits(limited, computed)
    assert hits > 0
    assert sum(one.stat().st_size for one in tmp_path.rglob("rows")) <= 6000

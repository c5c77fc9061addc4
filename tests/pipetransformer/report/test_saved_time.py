"""Prove that what a training has saved is told by the times of its own steps."""

from __future__ import annotations

import json

import pytest

from autocache import CacheStats
from pipetransformer.report import SavedTime

Step = tuple[float, int, CacheStats]
"""Seconds, the depth, and what was read and computed."""
NONE, ALL, NEW = CacheStats(), CacheStats(hits=8), CacheStats(misses=8)
UNFROZEN: list[Step] = [(9.0, 0, NONE), (4.0, 0, NONE), (4.0, 0, NONE)]
COMPUTED: list[Step] = [(5.0, 2, NEW), (2.0, 2, NEW), (2.0, 2, NEW)]
READ: list[Step] = [(1.0, 2, ALL)] * 3


def saved(*steps: Step) -> SavedTime:
    times = SavedTime()
    for seconds, depth, rows in steps:
        times.add(seconds, 8, depth=depth, rows=rows)
    return times


def test_steps_of_each_kind_tell_what_all_would_have_taken() -> None:
    times = saved(*UNFROZEN, *COMPUTED, *READ)
    assert times.seconds == 29.0
    # Unfrozen 9 x 4 s; without rows the last three steps take 2 s each, and not 1 s.
    assert times.line(29.0, 0) == (
        "training took 29 s, by its own steps 19% less than unfrozen (36 ± 0 s), and 9% less than "
        "with all rows computed (32 ± 0 s); 24 rows read, 24 computed"
    )


def test_what_has_no_steps_of_its_own_is_not_told() -> None:
    # From kept rows: neither was anything unfrozen, nor computed.
    assert saved(*READ).line(3.0, 24) == (
        "training took 3 s; 24 rows read (24 of other runs), 0 computed"
    )
    without = [(seconds, depth, NONE) for seconds, depth, _ in COMPUTED]
    assert saved(*UNFROZEN, *without).line(26.0, 0) == (
        "training took 26 s, by its own steps no less than unfrozen (24 ± 0 s)"
    )
    # One step of a kind has no spread.
    assert "without rows" not in saved(*UNFROZEN, *COMPUTED[:2], *READ).line(1.0, 0)
    assert saved(*UNFROZEN).line(17.0, 0) == ""


def test_a_depth_at_which_no_step_computed_all_counts_as_it_was() -> None:
    upgraded: list[Step] = [(1.5, 3, CacheStats(upgrades=8))] * 2
    assert saved(*COMPUTED, *READ, *upgraded).line(15.0, 0) == (
        "training took 15 s, by its own steps 17% less than with all rows computed (18 ± 0 s); "
        "24 rows read, 40 computed"
    )


def test_rows_that_were_computed_a_step_ahead_were_not_spared() -> None:
    ahead = [(3.0, 2, CacheStats(misses=8, ahead=8)), (1.0, 2, ALL)] * 3
    assert saved(*ahead, *READ).line(15.0, 0) == (
        "training took 15 s, by its own steps no less than with all rows computed (17.4 ± 3 s); "
        "24 rows read, 48 computed"
    )


@pytest.mark.parametrize(("took_s", "says"), [(102.0, "no less"), (85.5, "25% less")])
def test_a_difference_within_the_error_is_none(took_s: float, says: str) -> None:
    times = saved((9.0, 0, NONE), *[(s, 0, NONE) for s in (2.0, 4.0) * 18], (1.0, 1, NONE))
    # 38 steps of 3 s; the standard error of their mean is sqrt(1 / 35) s.
    assert f"{says} than unfrozen (114 ± 13 s)" in times.line(took_s, 0)


def test_a_resumed_training_goes_on_with_the_times_before() -> None:
    times = SavedTime()
    times.load_state_dict(json.loads(json.dumps(saved(*UNFROZEN, *COMPUTED).state_dict())))
    times.add(1.0, 8, depth=2, rows=ALL)
    assert times.line(20.0, 0) == saved(*UNFROZEN, *COMPUTED, READ[0]).line(20.0, 0)

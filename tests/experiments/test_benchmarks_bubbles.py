"""Test the benchmark of bubbles: that it runs what it says, and counts rightly; but no speed."""

from __future__ import annotations

import pytest

from autopipe import Span
from autopipe.schedule import Op
from experiments.benchmarks.bubbles import (
    Case,
    all_halves,
    all_interleaved,
    beside_computing,
    halves_table,
    interleaved_table,
    measure_on_this_rank,
)
from tests.helpers.pool import Pool


def test_predictions_have_the_bubbles_of_the_formula() -> None:
    for case in all_interleaved():
        bubble = case.predicted_s / case.computing_s - 1
        assert bubble == pytest.approx((case.workers - 1) / (case.chunks * case.micro_batches))


def test_what_travels_beside_computing_counts_once_and_a_link_carries_one_message() -> None:
    up = [Span(0, Op.SEND_ACTIVATION, i, at_s, at_s) for i, at_s in ((0, 1.0), (1, 2.0))]
    copied = Span(0, Op.SEND_ACTIVATION, 0, 1.0, 1.0, 8, 8, peer=1)
    # Under way from 1 to 5 s and, behind it, from 5 to 9 s.
    busy = [
        Span(0, Op.FORWARD, 1, 2.0, 4.0),
        Span(1, Op.FORWARD, 0, 3.0, 4.5),
        Span(1, Op.BACKWARD, 0, 8.0, 20.0),
    ]
    assert beside_computing([*up, copied, *busy], 4.0) == pytest.approx((2.5 + 1.0) / 8.0)
    assert beside_computing([*up, *busy], 0.0) == 0.0


def test_steps_run_with_chunks_delays_and_blocking_sends(two_ranks: Pool) -> None:
    chunked = [case for case in all_interleaved(0.005) if case.workers == 2]
    halves = [case for case in all_halves(0.005) if case.micro_batches < 4]
    found: dict[Case, list] = two_ranks.run(measure_on_this_rank, chunked + halves, 1)[0]
    rows = interleaved_table({case: found[case] for case in chunked}).splitlines()[2:]
    formulas = [row.split(" | ")[3] for row in rows]
    assert formulas == ["0.500", "0.250", "0.250", "0.125", "0.125", "0.062"]
    rows = halves_table({case: found[case] for case in halves}).splitlines()[2:]
    assert [row.split(" | ")[2] for row in rows] == ["go on", "go on", "wait"] * 2
    # One micro-batch has nothing to compute meanwhile, whatever the machine does.
    assert found[halves[1]][0].beside == 0.0 and halves[1].delay_s

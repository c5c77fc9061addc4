"""Test the benchmark of rows: each action runs, and the reads find all rows; no speed."""

from __future__ import annotations

import torch

from experiments.benchmarks.rows import NUM_THREADS, Rows, timed


def test_every_action_is_timed_in_every_round() -> None:
    rows = Rows("tiny", 3, 8, (5, 7), torch.bfloat16)
    seconds = timed(rows, num_rounds=2)
    assert seconds.keys() == {"memcpy", "python", "beside", *map(str, NUM_THREADS)}
    assert {len(values) for values in seconds.values()} == {2}
    assert rows.num_bytes == 3 * 5 * 7 * 2

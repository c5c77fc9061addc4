"""Prove that the plan benchmark computes what it claims, and fails where a bar is missed."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.benchmarks.plan import figures, grid, table


def found(
    *ratios: float,
    choice: tuple[int, int, str],
    best: tuple[int, int, str],
    pairs: tuple[float, ...],
) -> dict[str, Any]:
    """Make up what was measured: predictions that are so many times what steps took."""
    names = ("length", "micro_batches", "schedule")
    point = {"frozen": 0, "length": 1, "micro_batches": 1, "schedule": "1f1b"}
    # Two rounds whose medians have the ratio, though neither does.
    rows = [[point, [[0.5 * ratio, 1.5], [1.5 * ratio, 0.5]]] for ratio in ratios]
    one = {
        "frozen": 0,
        **dict(zip(names, choice, strict=True)),
        "ratios": list(pairs),
        "best": {"frozen": 0, **dict(zip(names, best, strict=True))},
        "paper": [2, 4],
        "paper_ratios": [1.25] * len(pairs),
    }
    return {"grid": rows, "choices": [one]}


ONE, TWO = (1, 1, "1f1b"), (2, 4, "gpipe")


def test_errors_are_of_the_medians_and_in_both_directions() -> None:
    line = figures(found(1.02, 0.9, 1.0, choice=ONE, best=ONE, pairs=(1.0,)))
    assert line["plan_error_median"] == pytest.approx(0.02)
    assert line["plan_error_max"] == pytest.approx(0.1)
    assert len(list(table(found(1.02, 0.9, choice=TWO, best=ONE, pairs=(1.1,))))) == 6
    assert (line["pipelines"], line["pairs"], line["paper_over_choice"]) == (3, 1, [1.25])


def test_the_grid_holds_every_pipeline_once_at_every_depth() -> None:
    points = grid((0, 3))
    assert len(points) == len(set(points)) == 24

"""Prove that the plan benchmark computes what it claims, and fails where a bar is missed."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.benchmarks.plan import BARS, figures, grid, table


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


@pytest.mark.parametrize(
    ("choice", "best", "pairs", "regret"),
    [
        (TWO, ONE, (1.1, 1.2, 1.3), 0.2),
        (TWO, ONE, (0.9, 0.8, 0.7), 0.0),
        (ONE, ONE, (1.1, 1.2, 1.3), 0.0),
        # A single stage runs both schedules alike.
        (ONE, (1, 1, "gpipe"), (1.2,), 0.0),
        (TWO, (2, 4, "1f1b"), (1.2,), 0.2),
        (TWO, (2, 8, "gpipe"), (1.2,), 0.2),
    ],
    ids=str,
)
def test_regret_is_what_the_choice_takes_longer_than_the_best(
    choice: tuple[int, int, str],
    best: tuple[int, int, str],
    pairs: tuple[float, ...],
    regret: float,
) -> None:
    line = figures(found(1.0, choice=choice, best=best, pairs=pairs))
    assert line["plan_regret"] == pytest.approx(regret, abs=1e-4)


def test_a_bar_that_is_missed_fails() -> None:
    within = figures(found(1.05, 0.95, choice=ONE, best=ONE, pairs=(2.0,)))
    median_beyond = figures(found(1.06, 0.94, choice=ONE, best=ONE, pairs=(2.0,)))
    rest_beyond = figures(found(1.0, 1.0, 1.16, choice=TWO, best=ONE, pairs=(1.06,)))
    assert BARS.missed_by(within) == []
    assert BARS.missed_by(median_beyond) == ["plan_error_median"]
    assert BARS.missed_by(rest_beyond) == ["plan_error_max", "plan_regret"]


def test_the_grid_holds_every_pipeline_once_at_every_depth() -> None:
    points = grid((0, 3))
    assert len(points) == len(set(points)) == 24

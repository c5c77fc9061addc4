"""Prove that layers that rest are those of a plain loop with requires_grad off, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import final

import pytest

from freeze import FreezeContext, FreezeDecision, FreezePolicy, Replay
from pipetransformer.report import read_decisions
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    latest,
    make_trainer,
    merge,
    run_to_end,
    train_in_two,
)

TABLE: dict[int, tuple[int, tuple[int, ...]]] = {
    0: (0, ()), 3: (0, (1, 3)), 6: (1, (2,)), 10: (0, (3,)), 12: (2, ()),
}  # fmt: skip
"""Frozen layers, and those that rest, by the steps from which they hold."""


@final
class Table(FreezePolicy):
    def decide(self, context: FreezeContext) -> FreezeDecision:
        num_frozen, resting = latest(TABLE, context.step)
        return FreezeDecision(num_frozen, "table", resting)


@measuring(never)
def fit(scenario: Scenario, folder: Path | None = None) -> Outcome:
    """Train to the end."""
    with make_trainer(scenario, Table(), folder=folder) as trainer:
        return run_to_end(trainer, None)


@measuring(never)
def repeat(scenario: Scenario, folder: Path) -> Outcome:
    """Train to the end as another run did."""
    with make_trainer(scenario, Replay(folder)) as trainer:
        return run_to_end(trainer, None)


@measuring(never)
def fit_in_two(scenario: Scenario, folder: Path) -> Outcome:
    """Train with a stop while layers rest."""
    return train_in_two(scenario, folder, stop=5, policy=Table)


def trains(step: int, layer: int) -> bool:
    """Return whether a layer trains at a step."""
    num_frozen, resting = latest(TABLE, step)
    return layer >= num_frozen and layer not in resting


@pytest.fixture(scope="module")
def truth() -> Outcome:
    return plain(Scenario({0: Shape(1, 2)}), trains=trains)


@pytest.mark.parametrize("shape", [slow(Shape(1, 2)), Shape(2, 3), slow(Shape(2, 3, "gpipe"))])
def test_layers_rest_as_in_a_plain_loop(two_ranks: Pool, truth: Outcome, shape: Shape) -> None:
    assert_equal(merge(two_ranks.run(fit, Scenario({0: shape}))), truth)


def test_they_rest_in_stages_of_their_own(four_ranks: Pool, truth: Outcome) -> None:
    # Each stage has one layer, or two: some have nothing to train at times.
    outcomes = four_ranks.run(fit, Scenario({0: Shape(4, 2), 10: Shape(2, 2)}))
    assert_equal(merge(outcomes), truth)


@pytest.mark.slow
def test_a_resume_goes_on_with_them(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(2, 2)}, dtype="float32")
    whole = two_ranks.run(fit, scenario, tmp_path / "whole")
    assert_same_bits(merge(two_ranks.run(fit_in_two, scenario, tmp_path / "cut")), merge(whole))


def test_a_run_can_be_repeated_with_them(tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(1, 2)}, dtype="float32")
    assert_same_bits(fit(scenario, tmp_path), repeat(scenario, tmp_path))
    decisions = {one.context.step: one for one in read_decisions(tmp_path)}
    seen = decisions[4].context
    assert seen.resting == (1, 3)
    norms = [layer.gradient_norm for layer in seen.layers]
    assert norms[1] is None is norms[3] and norms[0] is not None is not norms[2]
    assert decisions[4].reason == "keep: table"


@pytest.mark.parametrize("resting", [(0,), (-1,), (5,)])
def test_layers_that_cannot_rest_are_refused(resting: tuple[int, ...]) -> None:
    class Wrong(FreezePolicy):
        def decide(self, context: FreezeContext) -> FreezeDecision:
            return FreezeDecision(0, "wrong", resting)

    with pytest.raises(ValueError, match="only layers above the lowest"):
        with make_trainer(Scenario({0: Shape(1, 2)}), Wrong()) as trainer:
            trainer.step()

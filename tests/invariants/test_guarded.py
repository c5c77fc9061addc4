"""Prove that layers which a metric's fall thaws train on as in a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from freeze import FreezeContext, Guarded
from pipetransformer.report import read_decisions
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import tiny_data
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    latest,
    make_trainer,
    merge,
    run_to_end,
)

ACCURACIES = (0.5, 0.8, 0.6, 0.9, 0.9)
"""What the evaluations after 3, 6, 9, 12 and 15 steps are told to have found."""

WANTED = {0: 0, 2: 1, 7: 3}
FROZEN = {0: 0, 3: 1, 8: 3, 9: 1, 11: 3}
"""Frozen layers by step: as the policy wants them, and as a guard lets it after two decisions; the
fall at step 9 thaws what has frozen since step 6, and patience starts anew."""


def wanted(context: FreezeContext) -> int:
    found: int = latest(WANTED, context.step)
    return found


@measuring(never)
def fit(scenario: Scenario, folder: Path) -> Outcome:
    """Train to the end under a guard."""
    found = iter(ACCURACIES)

    def judge(prediction: Any) -> dict[str, float]:
        return {"accuracy": next(found)}

    with make_trainer(
        scenario,
        Guarded(wanted, patience=2, thaw_on="accuracy"),
        eval_dataset=tiny_data(),
        evaluate_every_steps=3,
        metrics={},
        compute_metrics=judge,
        folder=folder,
    ) as trainer:
        return run_to_end(trainer, None)


@pytest.mark.parametrize("shape", [slow(Shape(1, 2)), Shape(2, 3)])
def test_layers_that_a_fall_of_the_metric_thaws_train_on(
    two_ranks: Pool, tmp_path: Path, shape: Shape
) -> None:
    scenario = Scenario({0: shape}, frozen=FROZEN)
    assert_equal(merge(two_ranks.run(fit, scenario, tmp_path)), plain(scenario))
    decisions = {one.context.step: one for one in read_decisions(tmp_path)}
    frozen = {step: one.num_frozen for step, one in decisions.items()}
    assert frozen == {step: latest(FROZEN, step) for step in range(15)}
    assert decisions[9].reason == "accuracy fell back from 0.8 to 0.6"
    assert [layer.gradient_norm is not None for layer in decisions[10].context.layers][:3] == [
        False, True, True,
    ]  # fmt: skip

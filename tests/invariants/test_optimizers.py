"""No optimizer shows where its parameters were trained: frozen, thawed, on one stage or two.

A run that cuts, joins and moves the layers of the tiny model ends as a hand-written loop over the
whole of it does, with every loss, weight and entry of the optimizers' state.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from pipetransformer import named_optimizer
from pipetransformer.model import NamedParameters, OptimizerFactory, adapt
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.models import tiny_data, tiny_model
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    make_trainer,
    merge,
    run_to_end,
)

# Both ranks train all layers, share them, move one, and train alone again; frozen layers thaw.
SHAPES = {0: Shape(2, 3), 2: Shape(1, 2), 5: Shape(2, 2, "gpipe", (4,)), 8: Shape(1, 1)}
FROZEN = {0: 0, 3: 2, 6: 1}
LEARNING_RATE = 1e-2

QUICK = ("adafactor", "adamw", "muon", "sgd")
"""One of each kind of state; the others, much like one of these, are slow tests."""
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {},
    "adagrad": {},
    "nadam": {},
    "rmsprop": {"momentum": 0.9},
    "sgd": {"momentum": 0.9},
    "lion": {},
    "muon": {},
    "adopt": {},
    "laprop": {},
    "madgrad": {},
}
OTHERS = ("adadelta", "adam", "adamax", "radam", "adafactorbv", "adamp", "lars", "nadamw", "sgdw")


def scenario(**settings: Any) -> Scenario:
    return Scenario(SHAPES, FROZEN, settings={"epochs": 2, **settings})


def build(name: str) -> OptimizerFactory:
    return named_optimizer(name, LEARNING_RATE, weight_decay=0.1, **OPTIONS.get(name, {}))


def train_with(name: str, settings: dict[str, Any]) -> Outcome:
    """Run the scenario on this world with an optimizer by name."""
    one = scenario(optimizer=build(name), **settings)
    with measuring(never), make_trainer(one, one.policy()) as trainer:
        return run_to_end(trainer, None)


@pytest.mark.parametrize("name", [*QUICK, *map(slow, sorted({*OPTIONS, *OTHERS} - {*QUICK}))])
def test_an_optimizer_by_name_equals_the_plain_loop_across_transitions(
    two_ranks: Pool, name: str
) -> None:
    outcome = merge(two_ranks.run(train_with, name, {}))
    assert [entry["step"] for entry in outcome.extra["transitions"]] == [2, 3, 5, 6, 8]
    assert_equal(outcome, plain(scenario(), build(name)))


def decayed_by_hand(named: NamedParameters) -> Optimizer:
    """Build SGD with groups for each child of the tiny model, whose rates rise to the head's."""
    groups = []
    for layer in range(6):
        own = [p for name, p in named if name.startswith(f"{layer}.")]
        for is_matrix, decay in ((True, 0.1), (False, 0.0)):
            part = [p for p in own if (p.ndim == 2) is is_matrix]
            rate = LEARNING_RATE * 0.6 ** (5 - layer)
            groups.append({"params": part, "lr": rate, "weight_decay": decay})
    return torch.optim.SGD(groups, momentum=0.9)


def test_layer_decay_equals_rates_by_hand_across_transitions(two_ranks: Pool) -> None:
    outcome = merge(two_ranks.run(train_with, "sgd", {"layer_decay": 0.6}))
    assert_equal(outcome, plain(scenario(), decayed_by_hand))


def smoothed_problem(self: Scenario) -> Any:
    """Build the tiny model, its data and a loss that smooths by itself."""
    return adapt(tiny_model()), tiny_data(), nn.CrossEntropyLoss(label_smoothing=0.2)


def test_label_smoothing_trains_as_a_loss_that_smooths(two_ranks: Pool) -> None:
    outcome = merge(two_ranks.run(train_with, "adamw", {"label_smoothing": 0.2}))
    with patch.object(Scenario, "problem", smoothed_problem):
        assert_equal(outcome, plain(scenario(), build("adamw")))

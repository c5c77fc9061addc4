"""Prove that a policy's learning rates by layer are those of a plain loop, on any pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch.optim import AdamW, Optimizer

from freeze import FreezeOut, Replay
from pipetransformer.model import NamedParameters
from tests.helpers.measured import measuring, never
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
    train_in_two,
)

CONSTANT = {"learning_rate_schedule": "constant"}


@measuring(never)
def fit(scenario: Scenario) -> Outcome:
    """Train to the end."""
    with make_trainer(scenario, FreezeOut(0.6), **CONSTANT) as trainer:
        return run_to_end(trainer, None)


@measuring(never)
def fit_in_two(scenario: Scenario, folder: Path) -> Outcome:
    """Train with a stop on the way."""
    return train_in_two(scenario, folder, stop=7, policy=partial(FreezeOut, 0.6), **CONSTANT)


def plainly(scenario: Scenario) -> Outcome:
    """Train in a hand-written loop with one parameter group a layer and decay."""
    (layered, data, _), policy = scenario.problem(), FreezeOut(0.6)
    top, options = layered.num_layers, scenario.options
    layer_of = {
        name: sublayer.layer
        for index, sublayer in enumerate(layered.sublayers)
        for name in layered.tensors(index)
    }
    # An epoch's last batch is smaller; time counts samples.
    num_steps = -(-len(data) // options["global_batch_size"]) * options["epochs"]

    def build(named: NamedParameters) -> Optimizer:
        return AdamW(
            [
                {"params": [p], "layer": layer_of[n], "weight_decay": 0.1 * n.endswith("weight")}
                for n, p in named
            ]
        )

    return plain(
        scenario,
        build,
        trains=lambda step, layer: layer == top or policy.end(layer, top) > step / num_steps,
        rate=lambda group, step: (
            1e-2 * policy.learning_rate_scale(group["layer"], top, step / num_steps)
        ),
    )


@pytest.fixture(scope="module")
def truth() -> Outcome:
    return plainly(Scenario({0: Shape(1, 2)}))


@pytest.mark.parametrize("length", [1, 2])
def test_layers_learn_at_their_own_rates(two_ranks: Pool, truth: Outcome, length: int) -> None:
    outcomes = two_ranks.run(fit, Scenario({0: Shape(length, 2)}))
    assert_equal(merge(outcomes), truth)


@pytest.mark.slow
def test_a_resumed_run_goes_on_at_them(two_ranks: Pool, tmp_path: Path, truth: Outcome) -> None:
    outcomes = two_ranks.run(fit_in_two, Scenario({0: Shape(2, 2)}), tmp_path)
    assert_equal(merge(outcomes), truth)


def test_its_run_is_not_repeated_from_a_journal_that_lacks_the_rates(
    two_ranks: Pool, tmp_path: Path
) -> None:
    two_ranks.run(fit_in_two, Scenario({0: Shape(1, 2)}), tmp_path)
    with pytest.raises(ValueError, match="set learning rates by layer, too"):
        Replay(tmp_path)

"""Force arbitrary sequences of pipelines and frozen layers: nothing of it may show.

Every change must leave the losses and gradients, each parameter with its optimizer state (that of
frozen ones included) and the samples' order as they are in a hand-written loop, and in a run whose
pipeline never changes. hypothesis chooses the sequences; a failing example is printed as a
`Scenario`, to be pasted into a test of its own.
"""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import suppress
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.helpers.forced import EPOCHS, check, check_dropout, check_with_static, scenarios
from tests.helpers.measured import measuring, never
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Deep,
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    collect,
    make_trainer,
    merge,
    slow_start,
    train,
)

# The examples follow from the test alone; a failing one shrinks to few changes of short pipelines.
FEW = settings(
    max_examples=2,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=60)

# Nodes of two: pipelines over several, inside one, and none; frozen layers up and down; changes at
# consecutive steps; a last batch of two samples, which leaves replicas without any.
GROW_SHRINK_AND_THAW = Scenario(
    {
        0: Shape(2, 3),
        2: Shape(4, 3, "gpipe", (4, 5, 12)),
        3: Shape(1, 2),
        5: Shape(2, 4, "gpipe", (14,)),
        6: Shape(2, 2, "gpipe", (14,)),
        7: Shape(4, 9),
    },
    {0: 0, 3: 2, 5: 6, 7: 1},
    settings={"epochs": EPOCHS, "global_batch_size": 11, "prefix_chunk": 3},
    deep=Deep(ignored=True, num_samples=24),
    slots_per_node=2,
    looks=(3, 6),
)


@pytest.mark.slow
@example(scenario=GROW_SHRINK_AND_THAW)
@FEW
@given(scenario=scenarios(4))
def test_no_change_shows_on_four_processes(four_ranks: Pool, scenario: Scenario) -> None:
    check(four_ranks, scenario)


@pytest.mark.slow
def test_no_change_shows_on_eight_processes(eight_ranks: Pool) -> None:
    shapes = {
        0: Shape(8, 5),
        2: Shape(4, 5, "gpipe", (4, 5, 12)),
        3: Shape(1, 1),
        5: Shape(2, 3, "gpipe", (14,)),
        6: Shape(2, 2, "gpipe", (14,)),
        7: Shape(8, 9, "gpipe", (4, 5, 6, 7, 8, 14, 15)),
    }
    check(eight_ranks, dataclasses.replace(GROW_SHRINK_AND_THAW, shapes=shapes))


@settings(FEW, max_examples=2)
@given(scenario=scenarios(2))
@pytest.mark.slow
def test_dropout_knows_neither_the_run_nor_the_pipeline(
    two_ranks: Pool, scenario: Scenario
) -> None:
    check_dropout(two_ranks, scenario)


class Interrupted(Exception):
    """Stand for whatever ends a run; raised on every rank at the same point."""


def train_saving(scenario: Scenario, folder: str, every: int, stop: int) -> Outcome | None:
    """Continue what the folder holds to the end, or, None then, until interrupted at a step."""

    def rate(step: float, max_steps: int) -> float:
        if round(step) == stop:
            raise Interrupted
        return slow_start(step, max_steps)

    settings = {"checkpoint_every_steps": every, "resume": "auto", "learning_rate_schedule": rate}
    with suppress(Interrupted), measuring(never):
        policy = scenario.policy()
        with make_trainer(scenario, policy, folder=folder, **settings) as trainer:
            trainer.fit()
            return collect(trainer, [])
    return None


@pytest.mark.slow
@settings(MANY, max_examples=30)
@given(
    scenario=scenarios(4),
    every=st.integers(1, 4),
    stop=st.integers(1, 8),
    length=st.integers(1, 2),
)
def test_an_interrupted_run_ends_as_if_it_had_not_been_there_and_elsewhere(  # noqa: PLR0913
    two_ranks: Pool, four_ranks: Pool, scenario: Scenario, every: int, stop: int, length: int
) -> None:
    elsewhere = dataclasses.replace(scenario, shapes={0: Shape(length, 1)}, slots_per_node=None)
    with TemporaryDirectory() as folder:
        there, copy = f"{folder}/there", f"{folder}/copy"
        four_ranks.run(train_saving, scenario, there, every, stop)
        shutil.copytree(there, copy)
        same = merge(four_ranks.run(train_saving, scenario, there, every, -1))
        other = merge(two_ranks.run(train_saving, elsewhere, copy, every, -1))
    whole = merge(four_ranks.run(train, scenario))
    assert_same_bits(dataclasses.replace(same, losses=whole.losses), whole)
    assert_equal(dataclasses.replace(other, losses=whole.losses), whole)


@pytest.mark.slow
@MANY
@given(scenario=scenarios(2))
def test_two_processes_equal_the_plain_loop_and_the_static_run(
    two_ranks: Pool, scenario: Scenario
) -> None:
    check_with_static(two_ranks, scenario)


@pytest.mark.slow
@MANY
@given(scenario=scenarios(4))
def test_four_processes_equal_the_plain_loop_and_the_static_run(
    four_ranks: Pool, scenario: Scenario
) -> None:
    check_with_static(four_ranks, scenario)


@pytest.mark.slow
@MANY
@given(scenario=scenarios(8))
def test_eight_processes_equal_the_plain_loop_and_the_static_run(
    eight_ranks: Pool, scenario: Scenario
) -> None:
    check_with_static(eight_ranks, scenario)


@pytest.mark.slow
@settings(MANY, max_examples=30)
@given(scenario=scenarios(4))
def test_dropout_on_four_processes_knows_neither_the_run_nor_the_pipeline(
    four_ranks: Pool, scenario: Scenario
) -> None:
    check_dropout(four_ranks, scenario)

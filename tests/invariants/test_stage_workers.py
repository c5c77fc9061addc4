"""Prove that stages of several workers train as a plain loop does, whoever takes a micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipetransformer import Trainer
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Deep,
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    build_adamw,
    make_trainer,
    merge,
    run_to_end,
    train,
    train_in_two,
)


def shared(workers: tuple[int, ...], micro_batches: int = 3, **options: Any) -> Scenario:
    """Describe a run on one pipeline with so many workers a stage."""
    settings = {"stage_workers": workers, **options.pop("settings", {})}
    return Scenario({0: Shape(len(workers), micro_batches)}, settings=settings, **options)


@pytest.mark.parametrize(
    ("workers", "micro_batches"),
    [
        ((2, 1, 1), 3),
        *(
            slow(workers, count)
            for workers in ((2, 1, 1), (1, 3), (3, 1), (2, 2), (1, 2, 1))
            for count in (1, 2, 5, 6)
        ),
    ],
)
def test_four_processes_train_as_a_plain_loop_does(
    four_ranks: Pool, workers: tuple[int, ...], micro_batches: int
) -> None:
    scenario = shared(workers, micro_batches)
    ranks = four_ranks.run(train, scenario)
    assert_equal(merge(ranks), plain(scenario))
    held = ranks[0].extra["replica_digests"]
    ends = np.cumsum(workers)
    for first, end in zip((0, *ends), ends, strict=False):
        assert all(held[rank] == held[first] != {} for rank in range(first, end))


@pytest.mark.slow
def test_one_worker_a_stage_is_a_pipeline(two_ranks: Pool) -> None:
    ours, usual = shared((1, 1)), Scenario({0: Shape(2, 3)})
    assert_equal(merge(two_ranks.run(train, ours)), merge(two_ranks.run(train, usual)))


@pytest.mark.parametrize("workers", [(2, 2), (2, 1, 1)])
@pytest.mark.slow
def test_freezing_with_a_cache_equals_freezing_in_a_plain_loop(
    four_ranks: Pool, workers: tuple[int, ...]
) -> None:
    scenario = shared(workers, 4, frozen=(0, 2, 3, 3, 1), settings={"epochs": 5})
    outcome = merge(four_ranks.run(train, scenario))
    assert outcome.extra["hits"] > 0
    assert_equal(outcome, plain(scenario))


def test_side_inputs_go_to_the_worker_that_needs_them(four_ranks: Pool) -> None:
    scenario = shared((2, 1, 1), 4, deep=Deep(ignored=True))
    assert_equal(merge(four_ranks.run(train, scenario)), plain(scenario))


def planned(scenario: Scenario, folder: str, **settings: Any) -> Trainer:
    """Build a trainer that plans by itself."""
    options = {**scenario.settings, **settings}
    return make_trainer(scenario, scenario.policy(), plan="fastest", folder=folder, **options)


@measuring(never)
def fit(scenario: Scenario, folder: str) -> Outcome:
    with planned(scenario, folder) as trainer:
        return run_to_end(trainer, None)


@measuring(never)
def fit_in_two(scenario: Scenario, folder: str) -> Outcome:
    return train_in_two(scenario, folder, stop=6, policy=scenario.policy, plan="fastest")


@pytest.mark.parametrize("train_all", [fit, slow(fit_in_two)])
def test_the_planner_cuts_it_and_makes_replicas_of_what_is_too_short(
    four_ranks: Pool, tmp_path: Path, train_all: Any
) -> None:
    # The last epoch leaves the head alone: one sublayer for two stages.
    scenario = shared((3, 1), frozen=(0, 1, 5))
    outcome = merge(four_ranks.run(train_all, scenario, str(tmp_path)))
    lengths = [entry["length"] for entry in outcome.extra["transitions"]]
    assert lengths[0] == 2 and lengths[-1] == 1
    assert_equal(outcome, plain(scenario))


@measuring(never)
def predict(scenario: Scenario) -> tuple[Any, dict[str, float]]:
    model, data, loss_fn = scenario.problem()
    with Trainer(
        model, data, loss_fn=loss_fn, optimizer=build_adamw, eval_batch_size=5, **scenario.options
    ) as trainer:
        found = trainer.predict(data)
        trace = trainer.trace_step()
        assert sorted({span.stage for span in trace.spans}) == [0, 1]
        return found.predictions, found.metrics


def test_predictions_come_in_the_order_of_the_data_set(four_ranks: Pool) -> None:
    scenario = shared((2, 2), 3)
    model, data, _ = scenario.problem()
    with torch.no_grad():
        expected = model.model(data[:][0]).numpy()
    for found, metrics in four_ranks.run(predict, scenario):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert metrics["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage_workers": (2, 1)}, "are 3 processes, but 2 were started"),
        ({"stage_workers": (1, 1), "pipeline_length": 2}, "leave pipeline_length out"),
        (
            {"stage_workers": (1, 1), "global_batch_size": 1},
            "no micro-batch for each of the 2 processes",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    two_ranks: Pool, settings: dict[str, Any], message: str
) -> None:
    assert all(message in text for text in two_ranks.run(refusal, settings))


def refusal(settings: dict[str, Any]) -> str:
    scenario = Scenario({0: Shape(2, 2)})
    try:
        make_trainer(scenario, scenario.policy(), **settings)
    except ValueError as error:
        return str(error)
    return "none"

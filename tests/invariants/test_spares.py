"""Prove that where no pipeline uses every rank, the largest that fits trains, and the rest wait.

A spare takes part in the world's decisions and sums, and in nothing else: what is learned is what
a hand-written loop learns.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from autopipe.plan.request import PlanRequest
from autopipe.plan.search import plan_pipeline
from autopipe.profile.profile import Profile
from pipetransformer import PlanSituation, fastest_plan
from pipetransformer.elastic import fastest_per_sample
from pipetransformer.report.records import RECORDS_FILE, read_records
from tests.helpers.costs import sums
from tests.helpers.inspection import feed_of
from tests.helpers.measured import measuring, never
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.resumes import assert_resumes_with_the_same_bits, fit_until
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    collect,
    make_trainer,
    merge,
    train,
)
from tests.pipetransformer.elastic.test_planners import profile

THREE = Shape(3, 3, spares=True)
"""Of four ranks three train, and rank 3 is spare."""


def request(**changes: object) -> PlanRequest:
    """Ask for 8 samples on three ranks of a node."""
    values = {"num_ranks": 3, "slots_per_node": 3, "global_batch": 8, "num_frozen": 0}
    return PlanRequest(**{**values, **changes})  # type: ignore[arg-type]


def two_sublayers() -> Profile:
    """Return costs of two sublayers of 400 bytes each, which no three stages can share."""
    return profile(2, all_reduce=sums(0.0))


def situation(**changes: object) -> PlanSituation:
    """Plan the two sublayers, at the start of a run."""
    scale_batch = bool(changes.pop("scale_batch", False))
    return PlanSituation(
        0, 10, two_sublayers(), request(**changes), None, lambda _: 1.0, scale_batch
    )


def test_a_rank_stays_idle_only_where_no_length_uses_all() -> None:
    roomy = plan_pipeline(two_sublayers(), request())
    assert roomy.length == 1
    tight = plan_pipeline(two_sublayers(), request(memory_limit_bytes=799))
    assert (tight.length, tight.boundaries) == (2, (0, 1, 2))


@pytest.mark.parametrize("scale_batch", [False, True])
def test_the_trainer_s_planner_comes_to_the_same(scale_batch: bool) -> None:
    tight = situation(memory_limit_bytes=799, scale_batch=scale_batch)
    for planner in (fastest_plan, fastest_per_sample):
        assert planner(tight).length == 2
        assert planner(situation(scale_batch=scale_batch)).length == 1


def test_the_most_training_slots_come_first_and_then_the_fastest() -> None:
    # Seven ranks, three sublayers and a limit that one stage of two breaks: K = 3 trains on six.
    plan = plan_pipeline(
        profile(3, all_reduce=sums(0.0)),
        request(num_ranks=7, slots_per_node=7, memory_limit_bytes=799),
    )
    assert plan.length == 3


def test_what_fits_nowhere_is_refused_by_the_lengths_that_use_all() -> None:
    with pytest.raises(ValueError, match="no plan fits memory_limit_bytes = 399"):
        plan_pipeline(two_sublayers(), request(memory_limit_bytes=399))
    with pytest.raises(ValueError, match="no p"):
        fastest_plan(situation(memory_limit_bytes=399))


@pytest.mark.parametrize("shape", [THREE, dataclasses.replace(THREE, schedule="gpipe")], ids=str)
@pytest.mark.slow
def test_three_of_four_ranks_train_as_a_plain_loop_does(four_ranks: Pool, shape: Shape) -> None:
    scenario = Scenario({0: shape})
    outcomes = four_ranks.run(train, scenario)
    assert_equal(merge(outcomes), plain(scenario))
    assert not outcomes[3].states
    *trained, spare = outcomes[0].extra["replica_digests"]
    assert all(trained) and not spare


def test_becoming_spare_and_coming_back_changes_nothing(four_ranks: Pool) -> None:
    scenario = Scenario(
        {0: Shape(2, 3), 3: THREE, 6: Shape(1, 2), 8: THREE, 11: Shape(4, 2), 13: Shape(1, 1)},
        frozen={0: 0, 4: 1, 9: 2, 12: 0},
    )
    outcome = merge(four_ranks.run(train, scenario))
    shapes = [(entry["length"], entry["replicas"]) for entry in outcome.extra["transitions"]]
    assert (3, 1) in shapes and (1, 4) in shapes
    assert_equal(outcome, plain(scenario))


def test_ranks_beyond_the_most_replicas_stay_idle(four_ranks: Pool) -> None:
    scenario = Scenario(
        {0: Shape(4, 2), 4: Shape(2, 2), 8: Shape(1, 2), 11: Shape(2, 1)},
        frozen={0: 0, 4: 1, 8: 2},
        settings={"max_replicas": 1},
    )
    outcomes = four_ranks.run(train, scenario)
    assert_equal(merge(outcomes), plain(scenario))
    shapes = [(one["length"], one["replicas"]) for one in outcomes[0].extra["transitions"]]
    assert shapes == [(2, 1), (1, 1), (2, 1)]


@measuring(never)
def evaluate_and_trace(scenario: Scenario, folder: Path) -> tuple[Outcome, float, set[int]]:
    """Take all steps, one of them traced; then evaluate."""
    with make_trainer(scenario, scenario.policy(), folder=folder) as trainer:
        losses = [trainer.step().loss]
        stages = {span.stage for span in trainer.trace_step().spans}
        while not trainer.is_over:
            losses.append(trainer.step().loss)
        loss = trainer.evaluate(feed_of(trainer).dataset)["loss"]
        return collect(trainer, losses), loss, stages


def test_evaluation_trace_and_records_leave_the_spare_out(
    four_ranks: Pool, tmp_path: Path
) -> None:
    scenario = Scenario({0: THREE}, looks=(14,))
    outcome, loss, stages = four_ranks.run(evaluate_and_trace, scenario, tmp_path)[0]
    expected = plain(scenario)
    assert loss == pytest.approx(expected.extra["evaluations"][0], rel=1e-9)
    assert stages == {0, 1, 2}
    steps = [entry for entry in read_records(tmp_path / RECORDS_FILE) if entry["kind"] == "step"]
    assert {(entry["length"], entry["replicas"]) for entry in steps} == {(3, 1)}
    assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=1e-9)


@pytest.mark.slow
def test_a_run_with_a_spare_resumes_with_the_same_bits(four_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(4, 2), 4: THREE}, frozen=(0, 0, 1), dtype="float32")
    assert_resumes_with_the_same_bits(four_ranks, tmp_path, scenario, fit_until, 12)


@measuring(never)
def messages(scenario: Scenario) -> list[str]:
    """Take a few steps; return what was warned of."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("pipetransformer").addHandler(handler)
    try:
        with make_trainer(scenario, scenario.policy()) as trainer:
            for _ in range(6):
                trainer.step()
    finally:
        logging.getLogger("pipetransformer").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_spares_are_warned_of_once_by_rank_0(four_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(1, 1), 2: THREE}, frozen={0: 0, 4: 1})
    first, *others = four_ranks.run(messages, scenario)
    (warning,) = [message for message in first if "idle" in message]
    assert "K x R = 3 x 1 train, and ranks 3 stay idle" in warning
    assert not any("idle" in message for some in others for message in some)

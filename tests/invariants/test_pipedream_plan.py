"""Prove that a Trainer trains PipeDream's pipelines, chosen by a simulation or by the paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autopipe.profile import Profile
from autopipe.profile.network import LinkCost
from tests.helpers.delayed import delayed, stream
from tests.helpers.inspection import elastic_of
from tests.helpers.marks import slow
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


def heavy_end(*arguments: Any, **options: Any) -> Profile:
    """Find that the head's weights are far too large to be summed over replicas."""
    found = never(*arguments, **options)
    *others, head = found.sublayers
    head = dataclasses.replace(head, parameter_bytes=10**9, gradient_bytes=10**9)
    link = LinkCost(0.0, 1e9)
    return dataclasses.replace(found, sublayers=(*others, head), link=link, node_link=link)


def planned(outcome: Outcome, trainer: Any) -> Outcome:
    """Add what was planned."""
    plan = elastic_of(trainer).decision.plan
    chosen = {"plan": plan, "workers": trainer.world.stage_workers}
    return dataclasses.replace(outcome, extra={**outcome.extra, **chosen})


@measuring(heavy_end)
def train(scenario: Scenario, **settings: Any) -> Outcome:
    options = {**scenario.settings, "plan": "pipedream", **settings}
    with make_trainer(scenario, scenario.policy(), **options) as trainer:
        return planned(run_to_end(trainer, None), trainer)


def light(*arguments: Any, **options: Any) -> Profile:
    """Find that one sublayer takes longer than all others together."""
    found = never(*arguments, **options)
    first, *others = found.sublayers
    first = dataclasses.replace(first, forward_s=(1.0,))
    return dataclasses.replace(found, sublayers=(first, *others))


def sums_beside_computing(*arguments: Any, **options: Any) -> Profile:
    """Find that replicas compute for as long as they sum gradients."""
    found = never(*arguments, **options)
    alike = [
        dataclasses.replace(one, forward_s=(0.1,), parameter_bytes=10**8, output_bytes=1)
        for one in found.sublayers
    ]
    link = LinkCost(0.0, 1e9)
    return dataclasses.replace(found, sublayers=tuple(alike), link=link, node_link=link)


@measuring(sums_beside_computing)
def train_by(scenario: Scenario, plan: str) -> Outcome:
    options = {**scenario.settings, "plan": plan}
    with make_trainer(scenario, scenario.policy(), **options) as trainer:
        return planned(run_to_end(trainer, None), trainer)


@measuring(light)
def train_lightly(scenario: Scenario) -> Outcome:
    options = {**scenario.settings, "plan": "pipedream"}
    with make_trainer(scenario, scenario.policy(), **options) as trainer:
        return planned(run_to_end(trainer, None), trainer)


@measuring(heavy_end)
def fit_in_two(scenario: Scenario, folder: str) -> Outcome:
    return train_in_two(scenario, folder, stop=6, policy=scenario.policy, plan="pipedream")


def test_its_pipeline_trains_as_a_plain_loop_does_whatever_freezes(four_ranks: Pool) -> None:
    # The last epoch leaves the head alone: one sublayer, of which all become replicas.
    scenario = Scenario({0: Shape(1, 1)}, frozen=(0, 1, 5), settings={"epochs": 3})
    outcome = merge(four_ranks.run(train, scenario))
    assert_equal(outcome, plain(scenario))
    assert outcome.extra["workers"] == (3, 1)
    assert [entry["length"] for entry in outcome.extra["transitions"]][-1] == 1


@pytest.mark.parametrize("versions", ["stashed", slow("vertical_sync")])
def test_with_weight_versions_it_is_pipedream_s_training(four_ranks: Pool, versions: str) -> None:
    scenario = stream(Shape(1, 1), versions)
    outcome = merge(four_ranks.run(train, scenario))
    plan, workers = outcome.extra["plan"], outcome.extra["workers"]
    assert workers == (3, 1) and plan.num_micro_batches % 3 == 0
    shape = Shape(plan.length, plan.num_micro_batches, cuts=plan.boundaries[1:-1])
    settings = {"weight_versions": versions, "stage_workers": workers}
    by_hand = stream(shape, versions, settings=settings)
    assert_equal(outcome, delayed(by_hand))


def test_light_weights_make_all_processes_replicas(two_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(1, 1)})
    outcome = merge(two_ranks.run(train_lightly, scenario))
    assert outcome.extra["workers"] is None and outcome.extra["plan"].length == 1
    assert_equal(outcome, plain(scenario))


@pytest.mark.parametrize(("plan", "workers"), [("pipedream", (1, 1)), ("pipedream_paper", None)])
def test_the_paper_s_rule_hides_sums_and_the_simulation_does_not(
    two_ranks: Pool, plan: str, workers: tuple[int, ...] | None
) -> None:
    scenario = Scenario({0: Shape(1, 1)})
    outcome = merge(two_ranks.run(train_by, scenario, plan))
    assert outcome.extra["workers"] == workers
    assert_equal(outcome, plain(scenario))


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_workers(four_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(1, 1)}, frozen=(0, 1, 1))
    outcome = merge(four_ranks.run(fit_in_two, scenario, str(tmp_path)))
    assert_equal(outcome, plain(scenario))


def refusal(scenario: Scenario, settings: dict[str, Any]) -> str:
    try:
        train(scenario, **settings)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_what_cannot_be_is_refused_on_all_ranks(four_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(1, 1)})
    for settings, message in (
        ({"pipeline_length": 2}, "leave pipeline_length out"),
        ({"stage_workers": (3, 1)}, "leave stage_workers out"),
        ({"schedule": "gpipe"}, "leave schedule='gpipe' out"),
        ({"scale_batch": True}, "leave scale_batch out"),
        ({"global_batch_size": 3}, "give at least 4"),
        ({"memory_limit_bytes": 1000}, "of 3-1 workers, needs"),
    ):
        for text in four_ranks.run(refusal, scenario, settings):
            assert message in text, text

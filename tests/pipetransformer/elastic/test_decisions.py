"""Prove what policies and planners are shown, what is refused, and that memory limits plans."""

from __future__ import annotations

import dataclasses
import io
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import nn

from autopipe.profile import Profile
from pipetransformer import (
    FreezeContext,
    FreezeSchedule,
    PipelinePlan,
    PlanSituation,
    PolicyError,
    Trainer,
    fastest_plan,
)
from pipetransformer.elastic import elasticity as steering
from tests.helpers.forced import train_watched
from tests.helpers.measured import measuring, never, once
from tests.helpers.models import tiny_data, tiny_model, tiny_trainer
from tests.helpers.pool import Pool
from tests.helpers.scenario import PEAK_LEARNING_RATE, Deep, Scenario, Shape, slow_start


def failing_policy(context: FreezeContext) -> None:
    """Fail after the first epoch."""
    if context.epoch:
        raise KeyError("no such layer")


def train_with_failing_policy() -> str:
    """Return what this rank hears of a policy that fails on rank 0."""
    with (
        pytest.raises(PolicyError) as caught,
        tiny_trainer(global_batch_size=8, epochs=2, freeze=failing_policy) as trainer,
    ):
        trainer.fit()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_policy_that_fails_on_rank_0_is_heard_of_on_every_rank(two_ranks: Pool) -> None:
    # Rank 0 raised and left; the others waited in the broadcast until its timeout.
    first, second = two_ranks.run(train_with_failing_policy)
    text = "the freeze policy failing_policy raised KeyError at step 4: 'no such layer'"
    text += f" ({__file__}, line {failing_policy.__code__.co_firstlineno + 3})"
    assert (first, second) == (f"PolicyError: {text}", f"PolicyError: rank 0: {text}")


def train_with_few_active_layers() -> int:
    """Freeze all but the head under a pipeline length of 2."""
    with tiny_trainer(
        global_batch_size=8, epochs=2, pipeline_length=2, freeze=FreezeSchedule([0, 5])
    ) as trainer:
        trainer.fit()
        assert trainer.decision is not None
        return trainer.decision.plan.length


def test_a_set_length_gives_way_where_fewer_layers_are_active(two_ranks: Pool) -> None:
    # The planner found no pipeline of two stages over one layer, and the run died in its middle.
    assert two_ranks.run(train_with_few_active_layers) == [1, 1]


def plan_too_low(situation: PlanSituation) -> PipelinePlan:
    """Plan as if nothing were frozen."""
    request = dataclasses.replace(situation.request, num_frozen=0)
    return fastest_plan(dataclasses.replace(situation, request=request))


def test_a_plan_that_trains_frozen_layers_is_refused() -> None:
    # Its frozen layers ran twice, once in the prefix and once in the first stage.
    with (
        pytest.raises(ValueError, match=r"first boundary is 0, but with 2 frozen layers .* is 2"),
        tiny_trainer(freeze=FreezeSchedule([2]), plan=plan_too_low) as trainer,
    ):
        trainer.fit()


def test_a_policy_is_shown_the_learning_rate_at_every_step(two_ranks: Pool) -> None:
    # It was shown 0 before the first step, and wherever all of stage 0 was the user's own fixed
    # layers: a rule that waits for the warm-up's end never saw it.
    scenario = Scenario(
        {0: Shape(1, 2), 2: Shape(2, 2, cuts=(3,))},
        {0: 0},
        settings={"epochs": 1},
        deep=Deep(fixed=("embedding", "mix0", "mlp0")),
    )
    contexts = two_ranks.run(train_watched, scenario)[0].extra["contexts"]
    assert [context["learning_rate"] for context in contexts] == pytest.approx(
        [PEAK_LEARNING_RATE * slow_start(step, 5) for step in range(5)]
    )


@measuring(once)
def plan_with(
    free: tuple[int | None, int | None], limit: int | None, length: int | None = None
) -> tuple[int, int] | str:
    """Return K and the largest stage's bytes, where so much is free on the ranks, or the error."""

    def free_here(device: object) -> int | None:
        return free[trainer.world.rank]

    trainer = tiny_trainer(
        global_batch_size=8, micro_batches=2, pipeline_length=length, memory_limit_bytes=limit
    )
    # A plan counts on less than is free; a limit that a user gives is measured by that.
    counted = "free_bytes" if limit is not None else "plannable_bytes"
    with mock.patch.object(steering, counted, free_here), trainer:
        try:
            trainer.step()
        except (ValueError, RuntimeError) as error:
            return str(error)
        assert trainer.decision is not None
        plan = trainer.decision.plan
        return plan.length, max(plan.peak_bytes)


@measuring(once)
def last_pipelines(global_batch_size: int) -> tuple[int, int]:
    """Return K and R where all but one sublayer are frozen at the end, and K was to be 2."""
    with tiny_trainer(
        global_batch_size=global_batch_size,
        epochs=2,
        pipeline_length=2,
        freeze=FreezeSchedule([0, 5]),
    ) as trainer:
        trainer.fit()
        assert trainer.decision is not None
        topology = trainer.world.topology(trainer.decision.plan.length)
        return topology.length, topology.replicas


def test_ranks_that_a_batch_has_no_sample_for_stay_idle(two_ranks: Pool) -> None:
    assert two_ranks.run(last_pipelines, 1) == [(1, 1)] * 2
    assert two_ranks.run(last_pipelines, 2) == [(1, 2)] * 2


def test_no_stage_needs_more_than_is_free_on_the_fullest_device(two_ranks: Pool) -> None:
    much = 9**9
    (_, most), _ = two_ranks.run(plan_with, (None, None), None, 1)
    # Bytes a sample are measured at the largest size that was timed, which may differ.
    enough, less = most * 105 // 100, most * 95 // 100
    for length, peak in two_ranks.run(plan_with, (enough, much), None, 1):
        assert length == 1 and less < peak <= enough
    cases = (((enough, less), None), ((None, None), less), ((much, enough), less))
    for free, limit in cases:
        for message in two_ranks.run(plan_with, free, limit, 1):
            assert f"memory_limit_bytes = {less}" in message
        for length, peak in two_ranks.run(plan_with, free, limit):
            assert length == 2 and peak <= less


def unsure(*arguments: Any, **options: Any) -> Profile:
    """Give every sublayer one cost, with quartiles a quarter off."""
    measured = never(*arguments, **options)
    sublayers = tuple(replace(one, spread=(0.75, 1.25)) for one in measured.sublayers)
    return replace(measured, sublayers=sublayers)


@measuring(unsure)
def lines_shown() -> list[str]:
    """Return what a run writes above its bar."""
    shown = io.StringIO()
    with (
        redirect_stdout(shown),
        Trainer(
            tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), global_batch_size=8, epochs=1
        ) as trainer,
    ):
        trainer.step()
    return shown.getvalue().splitlines()


def test_progress_says_how_sure_a_plan_is_and_what_cannot_be_told_from_it(two_ranks: Pool) -> None:
    main, other = two_ranks.run(lines_shown)
    assert other == []
    (line,) = (line for line in main if "quartiles" in line)
    # 4 samples x 6 sublayers x 3 ms; K = 2 takes 9 rounds of 3 of them.
    assert line.startswith("step 0: a step takes 54 ms to 90 ms by the quartiles of what was mea")
    assert "K = 1, M = 1 (72 ms) and K = 2, M = 8 (81 ms) cannot be told apart" in line
    assert line.endswith("K = 1 is taken, the shortest pipeline")

"""Prove that live steps correct costs: all of them, those of slow ranks, those of a plan."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.loss import Loss
from autopipe.plan.request import PipelinePlan
from pipetransformer import adamw
from pipetransformer.config import TrainConfig
from pipetransformer.elastic import PlanSituation, fastest_plan
from pipetransformer.elastic import planner as planning
from pipetransformer.elastic.costs import Calibration
from pipetransformer.elastic.decision import Decision
from pipetransformer.elastic.planner import RunPlanner
from pipetransformer.feed import Clock
from pipetransformer.model import Task, adapt
from pipetransformer.processes.world import World
from tests.helpers import costs
from tests.helpers.costs import uniform
from tests.helpers.models import tiny_model

CLOCK = Clock(100, 2, 1000, 50, 1e-3, 1e-3)


def planner(*, num_ranks: int = 2, spread: float = 0.0, **settings: Any) -> RunPlanner:
    """Plan the tiny model's 6 sublayers, each 1 s forward and 2 s backward, on two ranks."""
    layered = adapt(tiny_model())
    config = TrainConfig(global_batch_size=12, **settings)
    names = frozenset(name for name, _ in layered.model.named_parameters())
    task = Task(layered, Loss(nn.CrossEntropyLoss()), adamw(), config, names)
    world = World(0, num_ranks, num_ranks, torch.device("cpu"), None, owned=False)
    layers = (
        costs.sublayer(layer, spread=(1 - spread, 1 + spread))
        for layer in range(len(layered.sublayers))
    )
    return RunPlanner(
        task,
        world,
        profile=costs.profile(*layers, cache_bytes_per_s=1e9),
        memory_limit_bytes=None,
        rows=SimpleNamespace(may_cache=config.cache, bytes_on_device=0),  # type: ignore[arg-type]
    )


def calibrate(
    one: RunPlanner, plan: PipelinePlan, *, measured_s: float, computed_s: tuple[float, float]
) -> None:
    """Have both ranks report what they computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "gather_json", lambda value, group: list(computed_s))
        decision = Decision(50, 0, plan, False, "")
        one.calibrate(CLOCK, decision, measured_s=measured_s, computed_s=computed_s[0])


def plan_of(one: RunPlanner) -> PipelinePlan:
    return one.plan(CLOCK, 0, None)[0]


def test_steps_that_take_longer_lengthen_what_is_predicted() -> None:
    one = planner(pipeline_length=1, micro_batches=1)
    plan = plan_of(one)
    assert plan.predicted_step_s == 6 * 6 * 3.0
    calibrate(one, plan, measured_s=2 * plan.training_s, computed_s=(200.0, 200.0))
    assert plan_of(one).predicted_step_s == pytest.approx(2 * plan.predicted_step_s)
    # Told by the same steps again, nothing changes.
    calibrate(one, plan, measured_s=2 * plan.training_s, computed_s=(200.0, 200.0))
    assert plan_of(one).predicted_step_s == pytest.approx(2 * plan.predicted_step_s)
    one.use(one.profile)
    assert plan_of(one).predicted_step_s == plan.predicted_step_s


def test_a_rank_that_computes_slowly_gets_fewer_sublayers_and_gets_them_back() -> None:
    one = planner(pipeline_length=2, micro_batches=6)
    plan = plan_of(one)
    assert plan.boundaries == (0, 3, 6)
    # Each stage is to compute 12 samples x 3 sublayers x 3 s.
    calibrate(one, plan, measured_s=plan.training_s, computed_s=(108.0, 216.0))
    uneven = plan_of(one)
    assert uneven.boundaries == (0, 4, 6)
    resumed = planner(pipeline_length=2, micro_batches=6)
    resumed.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert plan_of(resumed) == uneven
    # The four take 144 s now, and the two as long: rank 1 is still slow.
    calibrate(one, uneven, measured_s=uneven.training_s, computed_s=(144.0, 144.0))
    assert plan_of(one).boundaries == (0, 4, 6)
    calibrate(one, uneven, measured_s=uneven.training_s, computed_s=(144.0, 72.0))
    assert plan_of(one).boundaries == (0, 3, 6)


def test_replicas_with_unequal_shares_of_a_batch_are_not_taken_for_slow() -> None:
    one = planner(micro_batch_size=8, pipeline_length=1)
    plan = plan_of(one)
    # Of 12 samples one takes 8 and the other 4: 8 x 6 x 3 s, and half of that.
    calibrate(one, plan, measured_s=plan.training_s, computed_s=(144.0, 72.0))
    assert plan_of(one) == plan


@pytest.mark.parametrize(
    ("computed_s", "slowness"),
    [
        ((1.0, 1.0, 1.0), ()),
        ((1.0, 1.2, 1.0), ()),  # Noise.
        ((3.0, 3.0, 6.0), (1.0, 1.0, 2.0)),
        ((1.0, 2.0, 0.0), (1.0, 2.0, 1.0)),  # The third waits.
        ((0.0, 0.0, 0.0), ()),
    ],
)
def test_ranks_are_compared_with_the_fastest_beyond_noise(
    computed_s: tuple[float, ...], slowness: tuple[float, ...]
) -> None:
    calibration = Calibration()
    calibration.compare_ranks(computed_s, (1.0, 1.0, 1.0))
    assert calibration.applied_to(uniform(2)).slowness == slowness


def test_a_user_s_planner_must_return_the_micro_batches_that_their_size_makes() -> None:
    def two(situation: Any) -> PipelinePlan:
        return PipelinePlan(1, (0, 6), 2, "1f1b", 1.0, (0,))

    with pytest.raises(ValueError, match="wants 2 micro-batches, but micro_batch_size 2 makes 3"):
        plan_of(planner(plan=two, micro_batch_size=2))
    assert plan_of(planner(plan=two, micro_batch_size=3)).num_micro_batches == 2
    bad = dataclasses.replace(two(None), boundaries=(1, 6))
    with pytest.raises(ValueError, match="first boundary is 1, but with 0 frozen layers"):
        plan_of(planner(plan=lambda situation: bad))


@pytest.mark.parametrize(
    ("setting", "recompute"), [("auto", (False, True)), (True, (True,)), (False, (False,))]
)
def test_what_may_be_recomputed_is_as_the_setting_says(
    setting: Any, recompute: tuple[bool, ...]
) -> None:
    one = planner(activation_checkpointing=setting)
    assert one.request(CLOCK, 0, None).recompute == recompute
    assert plan_of(one).recomputes is (setting is True)


@pytest.mark.parametrize("setting", [True, False])
def test_a_user_s_planner_may_not_recompute_against_the_setting(setting: bool) -> None:
    def other(situation: PlanSituation) -> PipelinePlan:
        return dataclasses.replace(fastest_plan(situation), recomputes=not setting)

    message = f"plan has recomputes={not setting}, but activation_checkpointing is {setting}; let"
    with pytest.raises(ValueError, match=message):
        plan_of(planner(plan=other, activation_checkpointing=setting))
    assert plan_of(planner(plan=other)).recomputes is not setting


@pytest.mark.parametrize(
    ("device", "num_ranks", "cache_device", "read_s", "ahead"),
    [
        ("cpu", 1, "auto", 0.25, False),
        ("cuda", 2, "cpu", 0.25, True),
        ("cuda", 1, "cpu", 0.25, True),
        ("cuda", 1, "auto", 0.0625, False),
        ("cuda", 2, "auto", 0.0625, False),
        ("cuda", 2, "cuda", 0.0625, False),
    ],
)
def test_rows_are_read_at_the_rate_of_where_they_lie(
    device: str, num_ranks: int, cache_device: Any, read_s: float, ahead: bool
) -> None:
    one = planner(num_ranks=num_ranks, cache_device=cache_device)
    one._world.device = torch.device(device)
    rates = {"cache_bytes_per_s": 256.0, "cache_device_bytes_per_s": 1024.0}
    layers = (costs.sublayer(n, output_bytes=64.0) for n in range(6))
    one.profile = costs.profile(*layers, **rates)
    asked = one.request(CLOCK, 1, None)
    assert (asked.prefix_cached_s, asked.prefix_read_ahead) == (read_s, ahead)
    # Of a version that did not measure rows in a GPU's memory.
    one.profile = dataclasses.replace(one.profile, cache_device_bytes_per_s=None)
    asked = one.request(CLOCK, 1, None)
    assert (asked.prefix_cached_s, asked.prefix_read_ahead) == (0.25, device == "cuda")


def test_what_rows_take_on_a_gpu_is_not_for_other_pipelines() -> None:
    one, alone, told = planner(), planner(num_ranks=1), planner(memory_limit_bytes=100)
    present = dataclasses.replace(plan_of(planner(pipeline_length=2)), peak_bytes=(20.0, 50.0))
    decision = Decision(50, 1, present, False, "")
    for each in (one, alone, told):
        each._memory_limit_bytes = 100
    for taken, limit in ((0, 100), (30, 70), (60, 50)):
        for each in (one, alone, told):
            each._rows = SimpleNamespace(may_cache=True, bytes_on_device=taken)
        assert one.request(CLOCK, 2, decision).memory_limit_bytes == limit
        # At first there are no rows, a thaw has no use for them, and one process has one plan.
        assert one.request(CLOCK, 2, None).memory_limit_bytes == 100
        assert one.request(CLOCK, 0, decision).memory_limit_bytes == 100
        for each in (alone, told):
            assert each.request(CLOCK, 2, decision).memory_limit_bytes == 100


def test_what_writing_rows_takes_keeps_a_short_run_from_the_cache() -> None:
    # A sublayer takes 1/2 s a sample when frozen; a row of 64 bytes is read in 1/4 s and written
    # in 10 s. 200 steps are 4 epochs, of which 3 read; 2,500 are 50.
    profile = costs.profile(*(costs.sublayer(n, output_bytes=64.0) for n in range(6)))
    one = planner(pipeline_length=1)
    rates = {"cache_bytes_per_s": 256.0, "cache_write_bytes_per_s": 6.4}
    one.profile = dataclasses.replace(profile, **rates)
    short, long = (dataclasses.replace(CLOCK, step=0, max_steps=n) for n in (200, 2500))
    assert one.request(short, 1, None).prefix_cached_s is None
    assert one.request(long, 1, None).prefix_cached_s == 0.25


@pytest.mark.parametrize("length", [1, 2])
def test_a_run_without_flushes_is_planned_as_the_1f1b_that_it_is(length: int) -> None:
    """Where no schedule was faster, the plan and the progress said gpipe."""
    plan = plan_of(planner(pipeline_length=length, weight_versions="stashed"))
    assert plan.schedule == "1f1b"


@pytest.mark.parametrize(
    "settings", [{"weight_versions": "stashed"}, {"schedule": "1f1b"}], ids=["versions", "named"]
)
def test_a_users_planner_may_not_return_a_schedule_that_does_not_run(
    settings: dict[str, Any],
) -> None:
    def as_gpipe(situation: PlanSituation) -> PipelinePlan:
        return dataclasses.replace(fastest_plan(situation), schedule="gpipe")

    message = "the planner wants the schedule 'gpipe', but this run's are '1f1b': let it return"
    with pytest.raises(ValueError, match=message):
        plan_of(planner(plan=as_gpipe, **settings))
    assert plan_of(planner(plan=as_gpipe)).schedule == "gpipe"


def test_a_decision_is_told_with_its_range_and_what_cannot_be_told_from_it() -> None:
    unsure = planner(spread=0.25)
    plan = plan_of(unsure)
    assert (plan.length, plan.predicted_step_s) == (1, 108.0)
    text = unsure.how_sure(CLOCK, None, Decision(0, 0, plan, False, ""))
    assert text.startswith("a step takes 81000 ms to 135000 ms by the quartiles of what was")
    assert "K = 1, M = 1 (108000 ms) and K = 2, M = 12 (117000 ms) cannot be told" in text
    assert text.endswith("K = 1 is taken, the shortest pipeline")
    assert "told apart" not in planner(spread=0.01).how_sure(
        CLOCK, None, Decision(0, 0, plan, False, "")
    )


@pytest.mark.parametrize(
    "settings", [{"spread": 0.0}, {"num_ranks": 1, "spread": 0.25}, {"plan": fastest_plan}]
)
def test_nothing_is_said_of_what_was_not_measured_or_not_chosen_by_us(
    settings: dict[str, Any],
) -> None:
    one = planner(**{"spread": 0.25, **settings})
    assert one.how_sure(CLOCK, None, Decision(0, 0, plan_of(one), False, "")) == ""


def test_a_plan_that_was_tried_is_told_apart() -> None:
    one = planner(spread=0.25)
    plan = plan_of(one)
    one.calibration.correct(plan, 1.5)
    text = one.how_sure(CLOCK, None, Decision(0, 0, plan, False, ""))
    assert text == "a step takes 121500 ms to 202500 ms by the quartiles of what was measured"

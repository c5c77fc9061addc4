"""Prove that a Trainer without flushes trains by the delayed gradients that its formulas name."""

from __future__ import annotations

import math
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils.data import TensorDataset

from autopipe.schedule import Instruction, Op, StageWorkers, draw, replicated_one_f_one_b
from autopipe.stashing import VERSION_RULES, StagePlace
from pipetransformer import Callback, Trainer
from pipetransformer.stage import asynchronous
from tests.helpers.delayed import delayed, stream
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
    make_trainer,
    merge,
    run_to_end,
    train,
    train_in_two,
)

RULES = tuple(VERSION_RULES)


every_rule = pytest.mark.parametrize("versions", RULES)


def shared(
    workers: tuple[int, ...], micro_batches: int, versions: str, **options: Any
) -> Scenario:
    """Describe a run on one pipeline with so many workers a stage."""
    settings = {"stage_workers": workers, **options.pop("settings", {})}
    shape = Shape(len(workers), micro_batches)
    return stream(shape, versions, settings=settings, **options)


@pytest.mark.parametrize(
    ("workers", "micro_batches", "versions"),
    [
        ((2, 1, 1), 2, "stashed"),
        slow((3, 1), 3, "vertical_sync"),
        slow((1, 3), 3, "double_buffered"),
        *(
            slow(workers, count, versions)
            for workers, count in (((2, 1, 1), 4), ((3, 1), 6), ((2, 2), 2), ((1, 2, 1), 4))
            for versions in RULES
        ),
    ],
)
def test_stages_of_several_workers_train_by_the_gradients_of_their_turns(
    four_ranks: Pool, workers: tuple[int, ...], micro_batches: int, versions: str
) -> None:
    # The epochs' last batches are of two samples, so that some worker of three has none.
    scenario = shared(workers, micro_batches, versions)
    ranks = four_ranks.run(train, scenario)
    outcome = merge(ranks)
    assert_equal(outcome, delayed(scenario))
    assert outcome.losses[4] != pytest.approx(plain(scenario).losses[4], rel=1e-6)
    held, first = ranks[0].extra["replica_digests"], 0
    for count in workers:
        assert all(held[first] == held[rank] != {} for rank in range(first, first + count))
        first += count


def test_workers_in_turn_freeze_and_read_the_cache_in_a_stream(four_ranks: Pool) -> None:
    scenario = shared((2, 1, 1), 2, "stashed", frozen=(0, 1, 1, 1), settings={"epochs": 4})
    outcome = merge(four_ranks.run(train, scenario))
    assert outcome.extra["hits"] > 0
    assert_equal(outcome, delayed(scenario))


def test_turns_that_do_not_come_out_even_are_refused_on_all_ranks(four_ranks: Pool) -> None:
    # Of a planner's own micro-batches the settings know nothing.
    for text in four_ranks.run(refusal, shared((3, 1), 4, "stashed"), {}):
        assert "a step has 4 micro-batches for stages of (3, 1) workers" in text


def test_the_documented_grid_is_the_schedule_with_its_versions() -> None:
    documented = asynchronous.__doc__ or ""
    schedule = replicated_one_f_one_b((2, 1), 6, update_every=2)
    for row in draw(schedule, replicas=(2, 1)).splitlines():
        assert row in documented
    for stage in (0, 1):
        place = StagePlace(stage, 2, 2, (2, 1))
        met = (str(VERSION_RULES["stashed"](place, i)) for i in range(6))
        assert f"stage {stage}  {' '.join(met)}" in documented


@pytest.mark.parametrize("workers", [(2, 1), (3, 2), (1, 3, 2), (2, 2), (4, 1, 1)])
def test_no_worker_waits_for_ever_for_the_others_sums(workers: tuple[int, ...]) -> None:
    turn, steps = math.lcm(*workers), 4
    places = StageWorkers(workers)
    left = list(map(deque, replicated_one_f_one_b(workers, steps * turn, update_every=turn)))
    sent: Counter[tuple[bool, int, int]] = Counter()
    updated: Counter[int] = Counter()
    arrived: Counter[tuple[int, int]] = Counter()

    def may_go(worker: int, ins: Instruction) -> bool:
        stage, up = places.stages[worker], ins.op.is_forward
        if ins.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
            sent[up, stage + (1 if up else -1), ins.micro_batch] += 1
        if ins.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
            return bool(sent[up, stage, ins.micro_batch])
        return ins.op is not Op.UPDATE or arrived[stage, updated[worker]] == workers[stage]

    while any(left):
        moved = False
        for worker, program in enumerate(left):
            while program and may_go(worker, program[0]):
                done, moved = program.popleft(), True
                updated[worker] += done.op is Op.UPDATE
                if program and program[0].op is Op.UPDATE:
                    arrived[places.stages[worker], updated[worker]] += 1
        assert moved, left
    assert set(updated.values()) == {steps}


@every_rule
@pytest.mark.parametrize("micro_batches", [3, slow(1)])
def test_two_stages_train_by_delayed_gradients(
    two_ranks: Pool, versions: str, micro_batches: int
) -> None:
    scenario = stream(Shape(2, micro_batches), versions)
    outcome = merge(two_ranks.run(train, scenario))
    assert_equal(outcome, delayed(scenario))
    # More than rounding lies between that and training with flushes.
    assert outcome.losses[4] != pytest.approx(plain(scenario).losses[4], rel=1e-6)


@pytest.mark.slow
@every_rule
def test_four_stages_freeze_and_train_by_delayed_gradients(
    four_ranks: Pool, versions: str
) -> None:
    scenario = stream(Shape(4, 3), versions, frozen=(0, 1))
    assert_equal(merge(four_ranks.run(train, scenario)), delayed(scenario))


def test_one_stage_is_ordinary_training(two_ranks: Pool) -> None:
    scenario = stream(Shape(1, 2), RULES[0], frozen=(0, 2, 2))
    outcome = merge(two_ranks.run(train, scenario))
    assert outcome.extra["hits"] > 0
    assert_equal(outcome, plain(scenario))


@pytest.mark.slow
def test_replicas_of_a_pipeline_stay_equal(four_ranks: Pool) -> None:
    ranks = four_ranks.run(train, stream(Shape(2, 3), "stashed"))
    held = ranks[0].extra["replica_digests"]
    assert held[0] == held[2] != held[1] == held[3]


@measuring(never)
def fit_in_two(scenario: Scenario, folder: str) -> Outcome:
    """Stop behind the checkpoint of step 3, in the middle of an epoch, and resume."""
    every = {"checkpoint_every_steps": 3}
    return train_in_two(scenario, folder, stop=3, policy=scenario.policy, **every)


@measuring(never)
def fit_saving(scenario: Scenario, folder: str) -> Outcome:
    settings = {"checkpoint_every_steps": 3, "folder": folder}
    with make_trainer(scenario, scenario.policy(), **settings) as trainer:
        return run_to_end(trainer, None)


@pytest.mark.slow
def test_a_resume_goes_on_where_the_pipeline_was_empty(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = stream(Shape(2, 3), "stashed")
    whole = merge(two_ranks.run(fit_saving, scenario, str(tmp_path / "whole")))
    assert_equal(merge(two_ranks.run(fit_in_two, scenario, str(tmp_path / "two"))), whole)


class StopAt(Callback):
    """Ask for the end behind a step, on rank 1."""

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.global_step == 2 and not trainer.is_main_process:
            trainer.stop()


def stopped_after(scenario: Scenario) -> int:
    with make_trainer(scenario, scenario.policy(), callbacks=[StopAt()]) as trainer:
        trainer.fit()
        return trainer.global_step


def test_a_stop_takes_effect_where_the_pipeline_is_empty(two_ranks: Pool) -> None:
    # 26 samples are four steps of 6, and a stream of its own of the two that are left.
    assert two_ranks.run(stopped_after, stream(Shape(2, 3), "stashed")) == [4, 4]


def refusal(scenario: Scenario, settings: dict[str, Any]) -> str:
    try:
        with make_trainer(scenario, scenario.policy(), **settings) as trainer:
            trainer.fit()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_what_cannot_be_is_refused_on_all_ranks(two_ranks: Pool) -> None:
    scenario = stream(Shape(2, 3), "stashed")
    for settings, message in (
        ({"max_grad_norm": 1.0}, "leave max_grad_norm out"),
        ({"schedule": "gpipe"}, "leave schedule='gpipe' out"),
        ({"plan": "published"}, "leave plan='published' out"),
        ({"stage_workers": (2, 1), "micro_batches": 3}, "needs a multiple of 2, and has 3"),
        (
            {"stage_workers": (2, 1), "micro_batch_size": 4, "global_batch_size": 12},
            "needs a multiple of 2, and has 3",
        ),
        ({"stage_workers": (2, 1), "global_batch_size": 1}, "needs a multiple of 2, and has 1"),
    ):
        assert all(message in text for text in two_ranks.run(refusal, scenario, settings))
    ignoring = stream(Shape(2, 3), "stashed", deep=Deep(ignored=True))
    assert all("the loss counts" in text for text in two_ranks.run(refusal, ignoring, {}))


@pytest.mark.slow
def test_two_buffers_want_micro_batches_enough(four_ranks: Pool) -> None:
    scenario = stream(Shape(4, 2), "double_buffered")
    for text in four_ranks.run(refusal, scenario, {}):
        assert "at least 3 micro-batches a batch on 4 stages" in text


def test_cached_rows_stay_what_they_were_while_in_flight(four_ranks: Pool) -> None:
    scenario = stream(Shape(4, 1), "stashed", frozen=(0, 1, 1, 1), settings={"epochs": 4})
    outcome = merge(four_ranks.run(train, scenario))
    assert outcome.extra["hits"] > 0
    assert_equal(outcome, delayed(scenario))


def test_weights_that_a_model_s_own_methods_read_are_trained() -> None:
    weights = []
    for versions in (None, "stashed"):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3
        )
        data = TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(0, 3, (16,)))
        torch.manual_seed(1)
        with Trainer(
            model, data, loss_fn=torch.nn.CrossEntropyLoss(), epochs=1, global_batch_size=4,
            weight_versions=versions, progress=False,
        ) as trainer:  # fmt: skip
            trainer.fit()
        weights.append(model.state_dict())
    plainly, streamed = weights
    torch.manual_seed(0)
    before = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3
    ).state_dict()
    for name, tensor in streamed.items():
        assert not tensor.equal(before[name]), name
        assert tensor.equal(plainly[name]), name

"""Prove that timed pipelines train nothing, and that the published rules take M from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopipe import PlanRequest, Tables
from autopipe.throughput import best_count
from freeze import FreezeSchedule
from pipetransformer import Trainer, measure_throughput, published_plan, steering
from pipetransformer.measure import Measurements, measure
from pipetransformer.measure_throughput import _frozen_rows, measure_throughputs
from pipetransformer.planning import published_trials
from pipetransformer.records import read_records
from pipetransformer.stage import Stage
from pipetransformer.world import World, connect
from tests.models import tiny_data, tiny_model
from tests.pool import Pool
from tests.test_pipetransformer_measure import (
    ALONE,
    disturbed_model,
    make_task,
    read,
    snapshot,
)


class Stubborn(torch.optim.Optimizer):
    """Add one to every parameter, whatever the learning rate."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__([{"params": [p for _, p in named]}], {"lr": 1.0})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1.0)


def timed(
    world: World, *, model: nn.Sequential, tight: bool = False, **settings: Any
) -> tuple[Tables, dict[int, int]]:
    """Time what the rules want timed; return the tables, and each length's first active sublayer.

    Where memory is tight, a single stage does not fit with nothing frozen.
    """
    task = make_task(model, optimizer=Stubborn, batch_size=8, **settings)
    profile = measure(task, world, read).profile
    request = PlanRequest(world.size, world.slots_per_node, 8, 0)
    scale_batch = task.config.scale_batch
    trials = published_trials(profile, request, scale_batch=scale_batch)
    if tight:
        limit = min(max(plan.peak_bytes) for plan in trials[1]) - 1
        request = dataclasses.replace(request, memory_limit_bytes=limit)
        trials = published_trials(profile, request, scale_batch=scale_batch)
    tables = measure_throughputs(task, world, read=read, trials=trials)
    hooks = [p._post_accumulate_grad_hooks for p in task.model.model.parameters()]  # type: ignore[attr-defined]
    assert not any(hooks)
    return tables, {length: plans[0].boundaries[0] for length, plans in trials.items() if plans}


def timed_here(tight: bool) -> Any:
    """Do that on this rank; return it with what changed of the model."""
    world = connect("cpu", timeout_s=60.0)
    model = disturbed_model(writes=False)
    before = snapshot(model)
    found = timed(world, model=model, tight=tight)
    return found, changes(before, snapshot(model))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """Name what differs between two snapshots."""
    differing = [
        (kind, name)
        for kind in ("parameters", "gradients", "buffers", "random")
        for name, tensor in before[kind].items()
        if not torch.equal(after[kind][name], tensor)
    ]
    return differing + [
        (kind, "") for kind in ("flags", "needs", "objects", "generators")
        if after[kind] != before[kind]
    ]  # fmt: skip


def test_timing_alone_leaves_model_and_random_numbers_as_they_were() -> None:
    model = disturbed_model(writes=False)
    before = snapshot(model)
    tables, _ = timed(ALONE, model=model)
    assert {k: list(table) for k, table in tables.items()} == {1: [1, 2, 3, 4, 5, 6]}
    assert all(rate > 0 for rate in tables[1].values())
    assert changes(before, snapshot(model)) == []


def test_timing_on_two_ranks_covers_k_to_6_k_and_leaves_the_model_as_it_was(
    two_ranks: Pool,
) -> None:
    (found, changed), (other, also_changed) = two_ranks.run(timed_here, False)
    tables, first_active = found
    assert found == other and changed == also_changed == []
    # A replica has 8 samples on two stages, and 4 on one.
    assert {k: list(table) for k, table in tables.items()} == {2: [2, 4, 6, 8], 1: [1, 2, 3, 4]}
    assert first_active == {2: 0, 1: 0}


def test_a_length_that_does_not_fit_is_timed_with_layers_frozen(two_ranks: Pool) -> None:
    ((tables, first_active), changed), (_, also_changed) = two_ranks.run(timed_here, True)
    assert first_active[1] > 0 and changed == also_changed == []
    assert all(rate > 0 for rate in tables[1].values())


def test_the_frozen_layers_activations_are_a_sample_s_own() -> None:
    task = make_task(tiny_model())
    rows_of = _frozen_rows(task, torch.device("cpu"), read=read, first_active=3)
    rows = rows_of(torch.tensor([7, 5]))
    with torch.no_grad():
        hidden = task.model.model[:3](read(torch.tensor([0, 0]))["x"])  # type: ignore[index]
    torch.testing.assert_close(rows["hidden"], hidden)
    assert torch.equal(rows["y"], read(torch.tensor([0, 0]))["y"])


def faked(scale_batch: bool) -> Tables:
    """Time on a made-up clock: on rank 1, with more micro-batches, and at first, steps are longer.
    """
    world, clock, seen = connect("cpu", timeout_s=60.0), [0.0], set[tuple[int, int]]()

    def train_step(stage: Stage, ids: Tensor, *_: Any, **__: Any) -> None:
        assert len(ids) == 8 * (stage.topology.replicas if scale_batch else 1)
        shape = (stage.plan.length, stage.plan.num_micro_batches)
        clock[0] += shape[1] * (1.0 + world.rank) + (0.0 if shape in seen else 100.0)
        seen.add(shape)

    with (
        mock.patch.object(Stage, "train_step", train_step),
        mock.patch.object(measure_throughput, "now_s", lambda device: clock[0]),
    ):
        return timed(world, model=tiny_model(), scale_batch=scale_batch)[0]


def test_a_rate_is_the_batch_over_the_slowest_rank_s_seconds(two_ranks: Pool) -> None:
    for tables in two_ranks.run(faked, False):
        assert tables == {
            2: {m: 8 / (2 * m) for m in (2, 4, 6, 8)},
            1: {m: 8 / (2 * m) for m in (1, 2, 3, 4)},
        }
    for tables in two_ranks.run(faked, True):
        assert tables[1] == {m: 16 / (2 * m) for m in (1, 2, 3, 4, 5, 6)}


TABLES = {2: {2: 1.0, 4: 3.0, 6: 2.0}, 1: {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0}}
Timed = list[dict[int, list[int]]]
"""Of every timing, the lengths and their M."""


def trainer_as_published(**settings: Any) -> Trainer:
    """Train as published, three steps an epoch."""
    return Trainer(
        tiny_model(),
        tiny_data(num_samples=24),
        loss_fn=nn.CrossEntropyLoss(),
        **{
            "freeze": FreezeSchedule((0, 3)),
            "plan": published_plan,
            "epochs": 1,
            "batch_size": 8,
            "progress": False,
            "evaluate_every_epochs": 0,
            **settings,
        },
    )


def train_with_tables(settings: dict[str, Any]) -> tuple[list[tuple[int, int]], Timed, Tables]:
    """Train with made-up tables; return K and M of all decisions, the timings, and the tables."""
    timings: Timed = []

    def time_none(*_: Any, trials: Any, **__: Any) -> Tables:
        timings.append({k: [p.num_micro_batches for p in plans] for k, plans in trials.items()})
        return {length: TABLES[length] for length in trials if length in TABLES}

    with (
        mock.patch.object(steering, "measure_throughputs", time_none),
        trainer_as_published(**settings) as trainer,
    ):
        trainer.fit()
        assert trainer.measurements is not None and trainer.decision is not None
        tables = trainer.measurements.throughputs
        trainer.measure()
        assert trainer.measurements.throughputs == tables
        plan = trainer.decision.plan
        shapes = [(t["length"], t["micro_batches"]) for t in trainer.report.transitions]
    return [*shapes, (plan.length, plan.num_micro_batches)], timings, tables


def test_m_is_the_best_of_the_timed_table_which_a_checkpoint_keeps(
    two_ranks: Pool, tmp_path: Path
) -> None:
    common = {
        "folder": str(tmp_path / "run"), "checkpoint_every_epochs": 1, "resume": "auto",
    }  # fmt: skip

    def run(**settings: Any) -> tuple[list[tuple[int, int]], Timed, Tables]:
        found: Any = two_ranks.run(train_with_tables, {**common, **settings})
        assert found[0] == found[1]
        return found[0]  # type: ignore[no-any-return]

    assert run() == ([(2, 4)], [{2: [2, 4, 6, 8], 1: [1, 2, 3, 4]}], TABLES)
    assert run(epochs=2) == ([(1, 3), (1, 3)], [], TABLES)
    # Other batches and limits have other tables, and other planners none.
    assert len(run(epochs=3, batch_size=12)[1]) == 1
    assert len(run(epochs=4, batch_size=12, memory_limit_bytes=10**9)[1]) == 1
    assert run(epochs=5, batch_size=12, memory_limit_bytes=10**9, plan="fastest")[1:] == ([], {})
    noted = [r for r in read_records(tmp_path / "run" / "records.jsonl")
             if r["kind"] == "throughputs"]  # fmt: skip
    assert [record["step"] for record in noted] == [0, 6, 8]
    assert noted[0]["samples_per_s"]["2"] == {"2": 1.0, "4": 3.0, "6": 2.0}


def test_every_length_that_a_set_one_may_give_way_to_is_timed(four_ranks: Pool) -> None:
    (_, timings, _), *_ = four_ranks.run(train_with_tables, {"length": 4, "freeze": None})
    assert [list(trials) for trials in timings] == [[4, 2, 1]]


def test_where_m_is_set_nothing_is_timed_nor_missed(two_ranks: Pool) -> None:
    # With K = 1 a replica has but 4 samples, for which 8 micro-batches are too many.
    (shapes, timings, _), *_ = two_ranks.run(train_with_tables, {"micro_batches": 8})
    assert shapes == [(2, 8)] and timings == [{}]


def real_tables() -> Tables:
    """Train by the published rules, and return what was timed for them."""
    with trainer_as_published(plan="paper") as trainer:
        trainer.step()
        assert trainer.measurements is not None and trainer.decision is not None
        plan, tables = trainer.decision.plan, trainer.measurements.throughputs
        assert plan.num_micro_batches == best_count(tables[plan.length])
        return tables


def test_a_run_by_the_published_rules_times_its_pipelines(two_ranks: Pool) -> None:
    tables, others = two_ranks.run(real_tables)
    assert tables == others
    assert {k: list(table) for k, table in tables.items()} == {2: [2, 4, 6, 8], 1: [1, 2, 3, 4]}


def test_measurements_survive_json() -> None:
    profile = measure(make_task(), ALONE, read).profile
    whole = Measurements(profile, 2.0, TABLES)
    assert Measurements.from_json(whole.to_json()) == whole
    assert dataclasses.replace(whole, throughputs={}) != whole


def test_rules_that_can_make_no_plan_end_the_run_before_a_pipeline_is_timed() -> None:
    with (
        mock.patch.object(steering, "measure_throughputs", side_effect=AssertionError),
        Trainer(
            tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), plan="paper",
            schedule="1f1b", batch_size=8, progress=False,
        ) as trainer,
        pytest.raises(ValueError, match=r"rules train with 'gpipe', but schedules is \('1f1b',\)"),
    ):  # fmt: skip
        trainer.step()

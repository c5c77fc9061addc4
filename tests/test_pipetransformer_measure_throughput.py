"""Prove that timed pipelines train nothing, and that the published rules take M from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopipe import PlanRequest, Tables
from freeze import FreezeSchedule
from pipetransformer import Trainer, published_plan, steering
from pipetransformer.data import Batch
from pipetransformer.measure import Measurements, measure
from pipetransformer.measure_throughput import _frozen_rows, measure_throughputs
from pipetransformer.planning import published_trials
from pipetransformer.records import read_records
from pipetransformer.stage import Stage, StepResult
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
    tables = measure_throughputs(task, world, read, trials=trials)
    return tables, {length: plans[0].boundaries[0] for length, plans in trials.items() if plans}


def timed_here(tight: bool) -> Any:
    """Do that on this rank; return it with what changed of the model."""
    world = connect("cpu", timeout_s=60.0)
    model = disturbed_model()
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
    model = disturbed_model()
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
    ((tables, first_active), changed), _ = two_ranks.run(timed_here, True)
    assert first_active[1] > 0 and changed == []
    assert all(rate > 0 for rate in tables[1].values())


def test_the_frozen_layers_activations_are_a_sample_s_own() -> None:
    task = make_task(tiny_model())
    rows = _frozen_rows(task, torch.device("cpu"), read, 3)(torch.tensor([7, 5]))
    with torch.no_grad():
        hidden = task.model.model[:3](read(torch.tensor([0, 0]))["x"])  # type: ignore[index]
    torch.testing.assert_close(rows["hidden"], hidden)
    assert torch.equal(rows["y"], read(torch.tensor([0, 0]))["y"])


def faked(scale_batch: bool) -> Tables:
    """Time with steps of made-up seconds, on rank 1 and with more micro-batches longer ones."""
    world = connect("cpu", timeout_s=60.0)

    def train_step(stage: Stage, ids: Tensor, *_: Any, **__: Any) -> StepResult:
        assert len(ids) == 8 * (stage.topology.replicas if scale_batch else 1)
        seconds = stage.plan.num_micro_batches * (1.0 + world.rank)
        return StepResult(0.0, 0.0, False, seconds, {})

    with mock.patch.object(Stage, "train_step", train_step):
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


def train_as_published(
    folder: str, timings: list[int], epochs: int, batch_size: int
) -> list[tuple[int, int]]:
    """Train with made-up tables; return K and M of every transition, and count the timings."""

    def time_none(*_: Any, trials: Any, **__: Any) -> Tables:
        timings.append(len(trials))
        return TABLES

    with mock.patch.object(steering, "measure_throughputs", time_none), Trainer(
        tiny_model(),
        tiny_data(num_samples=24),
        loss_fn=nn.CrossEntropyLoss(),
        freeze=FreezeSchedule((0, 3)),
        plan=published_plan,
        epochs=epochs,
        batch_size=batch_size,
        folder=folder,
        checkpoint_every_epochs=1,
        resume="auto",
        progress=False,
        evaluate_every_epochs=0,
    ) as trainer:
        trainer.fit()
        assert trainer.measurements is not None and trainer.measurements.throughputs == TABLES
        trainer.measure()
        assert trainer.measurements.throughputs == TABLES
        transitions = [(t["length"], t["micro_batches"]) for t in trainer.report.transitions]
        assert trainer.decision is not None
        plan = trainer.decision.plan
    return [*transitions, (plan.length, plan.num_micro_batches)]


def trained_and_timed(folder: str, epochs: int, batch_size: int) -> tuple[list[Any], int]:
    """Train as published; say how often the tables were timed for it."""
    timings: list[int] = []
    return train_as_published(folder, timings, epochs, batch_size), len(timings)


def test_m_is_the_best_of_the_timed_table_which_a_checkpoint_keeps(
    two_ranks: Pool, tmp_path: Path
) -> None:
    run: Callable[..., Any] = two_ranks.run
    folder = str(tmp_path / "run")
    assert run(trained_and_timed, folder, 1, 8)[0] == ([(2, 4)], 1)
    assert run(trained_and_timed, folder, 2, 8)[0] == ([(1, 3), (1, 3)], 0)
    # Another batch has other rates.
    assert run(trained_and_timed, folder, 3, 12)[0][1] == 1
    noted = [r for r in read_records(tmp_path / "run" / "records.jsonl")
             if r["kind"] == "throughputs"]  # fmt: skip
    assert [record["step"] for record in noted] == [0, 3, 6]
    assert noted[0]["samples_per_s"]["2"] == {"2": 1.0, "4": 3.0, "6": 2.0}


def test_measurements_survive_json() -> None:
    profile = measure(make_task(), ALONE, read).profile
    whole = Measurements(profile, 2.0, TABLES)
    assert Measurements.from_json(whole.to_json()) == whole
    assert dataclasses.replace(whole, throughputs={}) != whole


def never(ids: Tensor) -> Batch:
    raise AssertionError("nothing is to be read")


def test_rules_that_can_make_no_plan_end_the_run_before_anything_is_timed() -> None:
    with (
        mock.patch.object(steering, "measure_throughputs", never),
        Trainer(
            tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(), plan="paper",
            schedule="1f1b", batch_size=8, progress=False,
        ) as trainer,
        pytest.raises(ValueError, match=r"rules train with 'gpipe', but schedules is \('1f1b',\)"),
    ):  # fmt: skip
        trainer.step()

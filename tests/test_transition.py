"""Prove that transitions and resumes lose nothing: no sample, no decision, no bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autodp import gather_json
from autopipe import draw, one_f_one_b
from freeze import FreezeSchedule
from pipetransformer import Trainer
from pipetransformer.deployment import Deployment
from tests.models import NUM_SAMPLES, tiny_data, tiny_model
from tests.pool import Pool
from tests.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    build_adamw,
    collect,
    merge,
    plain,
    slow_start,
)

SHRINKING = {0: Shape(2, 3), 5: Shape(2, 2), 7: Shape(1, 2)}


class Interrupted(Exception):
    """Stand for whatever ends a run; raised on every rank at the same point."""


def make_trainer(scenario: Scenario, folder: str | None, **settings: Any) -> Trainer:
    """Build a trainer that saves after every epoch."""
    dtype = getattr(torch, scenario.dtype)
    return Trainer(
        tiny_model(dtype=dtype),
        tiny_data(dtype=dtype),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=build_adamw,
        freeze=FreezeSchedule(scenario.frozen),
        **{**scenario.options, "folder": folder, "checkpoint_every_epochs": 1, **settings},
    )


def fit(scenario: Scenario, folder: str, resume: bool = False) -> Outcome:
    """Train to the end, from the start or from a checkpoint."""
    with make_trainer(scenario, folder, resume=resume) as trainer:
        trainer.fit()
        return collect(trainer, [0.0])


def fit_until(scenario: Scenario, folder: str, last_step: int) -> None:
    """Train until an interruption in the middle of a step."""

    def interrupting(step: float, max_steps: int) -> float:
        if round(step) >= last_step:
            raise Interrupted
        return slow_start(step, max_steps)

    with (
        pytest.raises(Interrupted),
        make_trainer(scenario, folder, learning_rate_schedule=interrupting) as trainer,
    ):
        trainer.fit()


def fit_until_transition(scenario: Scenario, folder: str, number: int) -> None:
    """Train until an interruption within a transition, after its decision has been recorded."""
    change, calls = Deployment.change, []

    def interrupted_change(self: Deployment, decision: Any) -> int:
        calls.append(decision)
        if len(calls) > number:
            raise Interrupted
        return change(self, decision)

    Deployment.change = interrupted_change  # type: ignore[method-assign]
    try:
        with pytest.raises(Interrupted), make_trainer(scenario, folder) as trainer:
            trainer.fit()
    finally:
        Deployment.change = change  # type: ignore[method-assign]


@pytest.mark.parametrize("last_step", [6, 9, 12])
def test_a_resumed_run_ends_with_the_uninterrupted_one_s_bits(
    two_ranks: Pool, tmp_path: Path, last_step: int
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    whole = merge(two_ranks.run(fit, scenario, str(tmp_path / "whole")))
    two_ranks.run(fit_until, scenario, str(tmp_path / "cut"), last_step)
    assert_same_bits(merge(two_ranks.run(fit, scenario, str(tmp_path / "cut"), True)), whole)


def test_four_replicas_resume_with_the_same_bits(four_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(4, 2), 6: Shape(1, 2)}, frozen=(0, 1), dtype="float32")
    whole = merge(four_ranks.run(fit, scenario, str(tmp_path / "whole")))
    four_ranks.run(fit_until, scenario, str(tmp_path / "cut"), 12)
    assert_same_bits(merge(four_ranks.run(fit, scenario, str(tmp_path / "cut"), True)), whole)


def test_a_run_killed_within_a_transition_resumes_with_the_same_bits(
    two_ranks: Pool, tmp_path: Path
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    whole = merge(two_ranks.run(fit, scenario, str(tmp_path / "whole")))
    two_ranks.run(fit_until_transition, scenario, str(tmp_path / "cut"), 2)
    assert_same_bits(merge(two_ranks.run(fit, scenario, str(tmp_path / "cut"), True)), whole)


def test_a_run_resumes_on_another_number_of_processes(
    two_ranks: Pool, four_ranks: Pool, tmp_path: Path
) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3))
    two_ranks.run(fit_until, scenario, str(tmp_path), 12)
    outcome = merge(
        four_ranks.run(
            fit, dataclasses.replace(scenario, shapes={0: Shape(2, 1)}), str(tmp_path), True
        )
    )
    reference = plain(scenario)
    assert_equal(dataclasses.replace(outcome, losses=reference.losses), reference)


def test_the_journal_wins_over_the_planner_after_a_resume(two_ranks: Pool, tmp_path: Path) -> None:
    scenario = Scenario(SHRINKING, frozen=(0, 2, 3), dtype="float32")
    whole = merge(two_ranks.run(fit, scenario, str(tmp_path / "whole")))
    two_ranks.run(fit_until, scenario, str(tmp_path / "cut"), 9)
    other = dataclasses.replace(scenario, shapes={**SHRINKING, 8: Shape(2, 2), 9: Shape(1, 2)})
    resumed = merge(two_ranks.run(fit, other, str(tmp_path / "cut"), True))
    assert_same_bits(resumed, whole)


class Logged(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Note which samples are read."""

    def __init__(self) -> None:
        self.data = tiny_data()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.data[index]


def read_by_epoch(scenario: Scenario) -> list[list[int]]:
    """Return the samples read in each epoch, by all ranks together."""
    data, epochs = Logged(), []
    with Trainer(
        tiny_model(),
        data,
        loss_fn=nn.CrossEntropyLoss(),
        cache=False,
        freeze=FreezeSchedule(scenario.frozen),
        **scenario.options,
    ) as trainer:
        trainer._set_up()
        data.read.clear()
        for _ in range(trainer.config.epochs):
            for _ in range(5):
                trainer.step()
            gathered = gather_json(data.read, group=trainer.world.group)
            epochs.append(sorted(index for one in gathered for index in one))
            data.read.clear()
    return epochs


def test_every_epoch_reads_every_sample_once_across_transitions(four_ranks: Pool) -> None:
    scenario = Scenario({0: Shape(4, 2), 3: Shape(2, 2), 8: Shape(1, 1), 11: Shape(2, 3)})
    for epochs in four_ranks.run(read_by_epoch, scenario):
        assert epochs == [list(range(NUM_SAMPLES))] * 3


def held_sublayers(scenario: Scenario) -> list[int]:
    """Return which sublayers each rank holds after a step in the second epoch."""
    with make_trainer(scenario, None, checkpoint_every_epochs=0) as trainer:
        for _ in range(6):
            trainer.step()
        model = trainer._task.model
        return [
            i
            for i in range(len(model.sublayers))
            if not any(t.is_meta for t in model.tensors(i).values())
        ]


def test_a_rank_holds_its_own_layers_and_nothing_else(two_ranks: Pool) -> None:
    assert two_ranks.run(held_sublayers, Scenario({0: Shape(2, 2)})) == [[0, 1, 2], [3, 4, 5]]
    frozen = Scenario({0: Shape(2, 2)}, frozen=(0, 2))
    assert two_ranks.run(held_sublayers, frozen) == [[0, 1, 2, 3], [4, 5]]


def trace_one_step() -> tuple[str, list[int], float]:
    """Train one traced step; return its grid, the peaks of kept micro-batches and the loss."""
    scenario = Scenario({0: Shape(2, 3)})
    with Trainer(tiny_model(), tiny_data(), loss_fn=nn.CrossEntropyLoss(),
                 **scenario.options) as trainer:
        trace = trainer.trace_step()
        peaks = [max(span.num_graphs for span in trace.spans if span.stage == stage)
                 for stage in range(2)]
        return trace.grid(), peaks, trainer.step().loss


def test_a_traced_step_shows_the_first_pipelines_schedule_on_every_rank(two_ranks: Pool) -> None:
    outcomes = two_ranks.run(trace_one_step)
    for grid, peaks, _ in outcomes:
        assert grid == draw(one_f_one_b(2, 3))
        assert peaks == [2, 1]

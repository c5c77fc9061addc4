"""Stop runs, resume them, and hold them against those that were never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipetransformer import Trainer
from tests.helpers.inspection import elastic_of
from tests.helpers.measured import measuring, never
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    assert_same_bits,
    build_adamw,
    collect,
    merge,
    nodes_of,
    slow_start,
)

# An epoch has 5 steps, so that most of these checkpoints lie within one.
EVERY_2_STEPS = {"checkpoint_every_steps": 2, "checkpoint_every_epochs": 0}


class Interrupted(Exception):
    """Stand for whatever ends a run; raised on every rank at the same point."""


def make_trainer(scenario: Scenario, folder: str | None, **settings: Any) -> Trainer:
    """Build a trainer that saves after every epoch."""
    model, data, loss_fn = scenario.problem()
    defaults = {"folder": folder, "checkpoint_every_epochs": 1, "freeze": scenario.policy()}
    with nodes_of(scenario.slots_per_node):
        return Trainer(
            model,
            data,
            eval_dataset=data,
            loss_fn=loss_fn,
            optimizer=build_adamw,
            **{**defaults, **scenario.options, **settings},
        )


@measuring(never)
def fit(scenario: Scenario, folder: str, resume: bool = False, **settings: Any) -> Outcome:
    """Train to the end, from the start or from a checkpoint."""
    with make_trainer(scenario, folder, resume=resume, **settings) as trainer:
        trainer.fit()
        outcome = collect(trainer, [0.0])
        transitions = [entry["step"] for entry in trainer.report.transitions]
        outcome.extra["report"] = [trainer.report.samples, trainer.report.metrics, transitions]
        outcome.extra["policy"] = elastic_of(trainer)._policy.state_dict()
        return outcome


def resume(scenario: Scenario, folder: str) -> Outcome:
    """Train to the end from a checkpoint."""
    return fit(scenario, folder, True)


@measuring(never)
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


_WHOLE: list[tuple[int, Scenario, Outcome]] = []


def uninterrupted(pool: Pool, scenario: Scenario, folder: Path) -> Outcome:
    """Train to the end at once; the same scenario only for the first test that asks for it."""
    for num_ranks, known, outcome in _WHOLE:
        if (num_ranks, known) == (pool.num_ranks, scenario):
            return outcome
    outcome = merge(pool.run(fit, scenario, str(folder / "whole")))
    _WHOLE.append((pool.num_ranks, scenario, outcome))
    return outcome


_CUT: list[tuple[int, Scenario, int, Path]] = []


def leave_interrupted(pool: Pool, scenario: Scenario, folder: Path, last_step: int) -> None:
    """Fill a folder as a run leaves it that is interrupted at a step; the same run is only trained
    for the first test that asks for it.
    """
    asked = (pool.num_ranks, scenario, last_step)
    left = next((path for *known, path in _CUT if (*known,) == asked), None)
    if left is None:
        left = folder.with_name(f"{folder.name} as left")
        pool.run(fit_until, scenario, str(left), last_step)
        _CUT.append((*asked, left))
    shutil.copytree(left, folder, symlinks=True)


def assert_resumes_with_the_same_bits(
    pool: Pool, folder: Path, scenario: Scenario, interrupt: Callable[..., None], *arguments: Any
) -> None:
    """Compare weights, optimizer state and report with those of a run that is not interrupted."""
    whole = uninterrupted(pool, scenario, folder)
    pool.run(interrupt, scenario, str(folder / "cut"), *arguments)
    resumed = merge(pool.run(resume, scenario, str(folder / "cut")))
    assert_same_bits(resumed, whole)
    for name in ("report", "policy"):
        assert resumed.extra[name] == whole.extra[name]

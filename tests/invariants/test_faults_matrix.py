"""Prove that a run survives the kill of each rank in each phase, and its stop there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import NUM_STEPS, TRANSITION, Fault, Run, assert_same_bits, ending, start

BOTH = ("step", "read", "forward", "loss", "reduce", "update", "decision", "leave", "move")
BOTH += ("adopt", "groups", "cache")
"""What every rank comes by at the transition, or in the first step of one pipeline each."""

ONLY = {0: ("policy", "journal", "cache file"), 1: ("cache opened",)}
SAVING = {0: ("save", "write", "publish", "pointer"), 1: ("save", "write")}
"""At the first save, when there is a pipeline of two ranks and each has something to write."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train without a fault."""
    run = Run(tmp_path_factory.mktemp("whole"))
    start(run)
    return run


def faults_of(rank: int, how: str, *, after: tuple[bool, ...]) -> tuple[Fault, ...]:
    """List a rank's faults, each for an attempt of its own."""
    here = [Fault(rank, point, TRANSITION) for point in (*BOTH, *ONLY[rank])]
    here += [Fault(rank, point) for point in SAVING[rank]]
    both = [replace(fault, how=how, after=one) for fault in here for one in after]
    return tuple(replace(fault, attempt=number) for number, fault in enumerate(both))


def survive(whole: Run, folder: Path, faults: tuple[Fault, ...], **settings: object) -> None:
    """Run with faults and a restart for each, and compare with the uninterrupted run."""
    run = replace(whole, folder=folder, faults=faults, settings=settings)
    start(run, max_restarts=len(faults))
    assert_same_bits(ending(run), ending(whole))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_before_and_after_every_phase_is_survived(
    whole: Run, tmp_path: Path, rank: int
) -> None:
    survive(whole, tmp_path, faults_of(rank, "kill", after=(False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_in_every_phase_is_survived(whole: Run, tmp_path: Path, rank: int) -> None:
    faults = faults_of(rank, "stop", after=(False,))
    survive(whole, tmp_path, faults, step_timeout_s=5.0, setup_timeout_s=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_random_steps_are_survived(whole: Run, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    # A step that was saved is not trained again, so none can be killed in it.
    steps = sorted(generator.choices(range(NUM_STEPS), k=8))
    faults = tuple(
        Fault(generator.randrange(2), "forward", step, attempt=attempt)
        for attempt, step in enumerate(steps)
    )
    survive(whole, tmp_path, faults)

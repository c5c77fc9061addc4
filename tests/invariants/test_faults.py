"""Prove that a run survives what can happen to a rank.

Every fault ends in a recovered run with the bits of the uninterrupted one, or in one clear error,
and leaves no process and no file behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipetransformer import WorkerFailedError
from tests.faults import (
    TRANSITION,
    Ending,
    Fault,
    Run,
    assert_same_bits,
    ending,
    read_notes,
    start,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Ending]:
    """Train without a fault; return the run and what was learnt."""
    run = Run(tmp_path_factory.mktemp("whole"))
    start(run)
    return run, ending(run)


def attempts(*faults: Fault) -> tuple[Fault, ...]:
    """Let each fault strike one attempt of the run, the next one the restarted run."""
    return tuple(replace(fault, attempt=number) for number, fault in enumerate(faults))


def survive(
    whole: tuple[Run, Ending], folder: Path, faults: tuple[Fault, ...], **settings: object
) -> Run:
    """Run with faults and a restart for each, and compare with the uninterrupted run."""
    run = replace(whole[0], folder=folder, faults=faults, settings=settings)
    start(run, max_restarts=len(faults))
    assert_same_bits(ending(run), whole[1])
    return run


def test_a_run_survives_kills_within_steps_and_in_every_phase_of_a_transition(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    faults = attempts(
        Fault(1, "measure"),
        Fault(0, "forward", step=2, call=1),
        Fault(0, "journal", step=TRANSITION, after=True),
        Fault(1, "decision", step=TRANSITION, after=True),
        Fault(0, "move", step=TRANSITION),
        Fault(1, "adopt", step=TRANSITION),
        Fault(0, "groups", step=TRANSITION, after=True),
        Fault(0, "cache file", step=TRANSITION, after=True),
        Fault(1, "cache opened", step=TRANSITION, after=True),
        Fault(1, "reduce", step=11),
    )
    survive(whole, tmp_path, faults)


@pytest.mark.slow
def test_a_run_survives_kills_while_it_saves_and_resumes(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    faults = attempts(
        Fault(1, "write"),
        Fault(0, "write", call=1, after=True),
        Fault(0, "pointer", after=True),
        Fault(0, "pointer", call=1, after=True),
        Fault(1, "adopt"),
    )
    survive(whole, tmp_path, faults)


@pytest.mark.slow
def test_a_stopped_rank_is_waited_for_no_longer_than_a_step_may_take(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    # At step 7 the ranks are replicas, which wait for each other in the world's sums.
    faults = attempts(Fault(1, "forward", step=7, how="stop"))
    survive(whole, tmp_path, faults, step_timeout_s=5.0, setup_timeout_s=600.0)


@pytest.mark.slow
def test_an_error_in_the_user_s_code_on_one_rank_restarts_the_run(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    faults = attempts(
        Fault(0, "read", step=1, how="raise"),
        Fault(1, "loss", step=4, how="raise"),
        Fault(0, "policy", step=TRANSITION, how="raise"),
        Fault(0, "planner", step=TRANSITION, how="raise"),
        Fault(1, "loss", step=7, how="exit"),
    )
    survive(whole, tmp_path, faults)


def test_an_error_that_stays_ends_the_run_and_names_its_rank(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    faults = attempts(*[Fault(1, "loss", how="raise")] * 2)
    run = replace(whole[0], folder=tmp_path, faults=faults)
    with pytest.raises(WorkerFailedError, match=r"^rank 1 of 2 .* failed .* after 1 restart\(s\)"):
        start(run, max_restarts=1)


def test_a_disk_without_space_costs_the_checkpoint_and_not_the_run(
    whole: tuple[Run, Ending], tmp_path: Path
) -> None:
    fault = Fault(1, "write", how="full")
    run = replace(whole[0], folder=tmp_path, faults=(fault,))
    start(run)
    assert_same_bits(ending(run), whole[1])
    (warning,) = read_notes(tmp_path / "warnings")
    assert warning.startswith("rank 0: no checkpoint of step 3: rank 1: ")
    assert "File too large" in warning and warning.endswith("training goes on")

"""Prove that a run survives what can happen to a rank.

Every fault ends in a recovered run with the bits of the uninterrupted one, or in one clear error,
and leaves no process and no file behind.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.soak import last_checkpoint
from pipetransformer import WorkerFailedError, launch
from pipetransformer.processes.world import STORE_VARIABLE
from pipetransformer.report.records import RECORDS_FILE, read_records
from tests.helpers.faults import (
    NUM_STEPS,
    TRANSITION,
    Ending,
    Fault,
    Run,
    assert_close,
    assert_same_bits,
    ending,
    has_ended,
    read_notes,
    read_pids,
    start,
    train,
)
from tests.helpers.scenario import Shape

Whole = tuple[Run, Ending]
"""A run without a fault, and what it learnt."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Train without a fault; return the run and what was learnt."""
    run = Run(tmp_path_factory.mktemp("whole"))
    start(run)
    return run, ending(run)


def attempts(*faults: Fault) -> tuple[Fault, ...]:
    """Let each fault strike one attempt of the run, the next one the restarted run."""
    return tuple(replace(fault, attempt=number) for number, fault in enumerate(faults))


def survive(whole: Whole, folder: Path, faults: tuple[Fault, ...], **settings: object) -> Run:
    """Run with faults and a restart for each, and compare with the uninterrupted run."""
    run = replace(whole[0], folder=folder, faults=faults, settings=settings)
    start(run, max_restarts=len(faults))
    assert_same_bits(ending(run), whole[1])
    return run


@pytest.mark.slow
def test_a_run_survives_kills_within_steps_and_in_every_phase_of_a_transition(
    whole: Whole, tmp_path: Path
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
def test_a_run_survives_kills_while_it_saves_and_resumes(whole: Whole, tmp_path: Path) -> None:
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
    whole: Whole, tmp_path: Path
) -> None:
    # At step 7 the ranks are replicas, which wait for each other in the world's sums.
    faults = attempts(Fault(1, "forward", step=7, how="stop"))
    survive(whole, tmp_path, faults, step_timeout_s=5.0, setup_timeout_s=600.0)


@pytest.mark.slow
def test_an_error_in_the_user_s_code_on_one_rank_restarts_the_run(
    whole: Whole, tmp_path: Path
) -> None:
    faults = attempts(
        Fault(0, "read", step=1, how="raise"),
        Fault(1, "loss", step=4, how="raise"),
        Fault(0, "policy", step=TRANSITION, how="raise"),
        Fault(0, "planner", step=TRANSITION, how="raise"),
        Fault(1, "loss", step=7, how="exit"),
    )
    survive(whole, tmp_path, faults)


def test_an_error_that_stays_ends_the_run_and_names_its_rank(whole: Whole, tmp_path: Path) -> None:
    faults = attempts(*[Fault(1, "loss", how="raise")] * 2)
    run = replace(whole[0], folder=tmp_path, faults=faults)
    with pytest.raises(WorkerFailedError, match=r"^rank 1 of 2 .* failed .* after 1 restart\(s\)"):
        start(run, max_restarts=1)


def test_a_disk_without_space_costs_the_checkpoint_and_not_the_run(
    whole: Whole, tmp_path: Path
) -> None:
    fault = Fault(1, "write", how="full")
    run = replace(whole[0], folder=tmp_path, faults=(fault,))
    start(run)
    assert_same_bits(ending(run), whole[1])
    (warning,) = read_notes(tmp_path / "warnings")
    assert warning.startswith("rank 0: no checkpoint of step 3: rank 1: ")
    assert "File too large" in warning and warning.endswith("training goes on")


BOTH = ("step", "read", "forward", "loss", "reduce", "update", "decision", "leave", "move")


BOTH += ("adopt", "groups", "cache")
"""What every rank comes by at the transition, or in the first step of one pipeline each."""


ONLY = {0: ("policy", "journal", "cache file"), 1: ("cache opened",)}


SAVING = {0: ("save", "write", "publish", "pointer"), 1: ("save", "write")}
"""At the first save, when there is a pipeline of two ranks and each has something to write."""


def faults_of(rank: int, how: str, *, after: tuple[bool, ...]) -> tuple[Fault, ...]:
    """List a rank's faults, each for an attempt of its own."""
    here = [Fault(rank, point, TRANSITION) for point in (*BOTH, *ONLY[rank])]
    here += [Fault(rank, point) for point in SAVING[rank]]
    both = [replace(fault, how=how, after=one) for fault in here for one in after]
    return tuple(replace(fault, attempt=number) for number, fault in enumerate(both))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_before_and_after_every_phase_is_survived(
    whole: Whole, tmp_path: Path, rank: int
) -> None:
    survive(whole, tmp_path, faults_of(rank, "kill", after=(False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_in_every_phase_is_survived(whole: Whole, tmp_path: Path, rank: int) -> None:
    faults = faults_of(rank, "stop", after=(False,))
    survive(whole, tmp_path, faults, step_timeout_s=5.0, setup_timeout_s=5.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_at_random_steps_are_survived(whole: Whole, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    # A step that was saved is not trained again, so none can be killed in it.
    steps = sorted(generator.choices(range(NUM_STEPS), k=8))
    faults = tuple(
        Fault(generator.randrange(2), "forward", step, attempt=attempt)
        for attempt, step in enumerate(steps)
    )
    survive(whole, tmp_path, faults)


SLOTS = 2


LOST_RANK = 3


LOSS_STEP = 8
"""Behind the transition at step 5, and behind two saves."""


def train_on_node(run: Run, node: int) -> None:
    """Train as a rank of one of two nodes; after a restart there is but this one."""
    if os.environ["PIPETRANSFORMER_RESTART_COUNT"] == "0":
        rank = node * SLOTS + int(os.environ["LOCAL_RANK"])
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(2 * SLOTS), **{STORE_VARIABLE: str(run.folder / "meet")}
        )
    train(run)


def train_on_first_node(run: Run) -> None:
    train_on_node(run, 0)


def second_node(folder: str) -> None:
    """Be the launcher of the second node, on which a rank takes the whole node with it."""
    launch(train_on_node, (nodes_run(Path(folder)), 1), num_slots=SLOTS, start_method="forkserver")


def nodes_run(folder: Path) -> Run:
    """Describe the run; dropout is off, as its masks depend on the micro-batches' sizes."""
    return Run(
        folder,
        faults=(Fault(LOST_RANK, "forward", step=LOSS_STEP, how="node"),),
        shapes={0: Shape(2, 1), 5: Shape(1, 1)},
        dtype="float64",
        dropout=0.0,
    )


@pytest.mark.slow
def test_a_run_goes_on_with_the_node_that_is_left(tmp_path: Path) -> None:
    # In a cluster torchrun's launchers find each other again; here ranks know who is left.
    run, whole = nodes_run(tmp_path / "nodes"), nodes_run(tmp_path / "whole")
    whole = replace(whole, faults=())
    start(whole)
    run.folder.mkdir()
    script = (
        f"from tests.invariants.test_faults import second_node; second_node({str(run.folder)!r})"
    )
    # A launcher that is killed leaves the folder that it made.
    with tempfile.TemporaryDirectory() as temporary:
        lost = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": temporary},
        )
        try:
            start(run, entry=train_on_first_node, num_slots=SLOTS, max_restarts=1)
            assert lost.wait() == -signal.SIGKILL
            pids = read_pids(run, lost.pid)
            assert len(pids) == SLOTS and all(has_ended(pid, wait_s=30.0) for pid in pids)
        finally:
            lost.kill()
            lost.wait()
    assert_close(ending(run), ending(whole))
    records = read_records(run.folder / "run" / RECORDS_FILE)
    worlds = {r["step"]: r["length"] * r["replicas"] for r in records if r["kind"] == "step"}
    assert [worlds[step] for step in (0, 14)] == [2 * SLOTS, SLOTS]
    assert last_checkpoint(run.folder, NUM_STEPS).scalars["world"]["num_ranks"] == SLOTS

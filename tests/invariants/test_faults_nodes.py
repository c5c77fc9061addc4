"""Prove that a run over two nodes goes on with one of them when the other is lost.

A node is a launcher with its ranks. In a cluster torchrun's launchers find each other again after
a loss; here a node's ranks know by themselves who is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.soak import last_checkpoint
from pipetransformer import launch
from pipetransformer.processes.world import STORE_VARIABLE
from pipetransformer.report.records import RECORDS_FILE, read_records
from tests.faults import (
    NUM_STEPS,
    Fault,
    Run,
    assert_close,
    ending,
    has_ended,
    read_pids,
    start,
    train,
)
from tests.scenario import Shape

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
    launch(
        train_on_node,
        (nodes_run(Path(folder)), 1),
        num_slots=SLOTS,
        start_method="forkserver",
    )


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
    run, whole = nodes_run(tmp_path / "nodes"), nodes_run(tmp_path / "whole")
    whole = replace(whole, faults=())
    start(whole)
    run.folder.mkdir()
    script = (
        "from tests.invariants.test_faults_nodes import second_node; "
        f"second_node({str(run.folder)!r})"
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

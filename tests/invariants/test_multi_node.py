"""Prove that a run over several nodes is the run of one process, and survives the loss of a node.

A node is a torchrun launcher with its ranks; two of them share a machine and a network that nobody
else hears. Pipelines of two stages lie within a node, replicas across.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

from pipetransformer.report.records import RECORDS_FILE, read_records
from tests.helpers.models import NUM_SAMPLES
from tests.helpers.nodes import Cluster, elastic_torchrun, logs, run_nodes, torchrun
from tests.helpers.plain_scenario import plain
from tests.helpers.pool import Pool
from tests.helpers.scenario import (
    Outcome,
    Scenario,
    Shape,
    assert_equal,
    assert_same_bits,
    collect,
    make_trainer,
    merge,
    slow_start,
)

SCENARIO = Scenario({0: Shape(2, 3), 5: Shape(1, 2)}, frozen=(0, 2, 2), slots_per_node=2)
INTERRUPTED_STEP = 12
"""Behind the transition before step 5, and behind two checkpoints, of which the first at least
has been finished by then."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Say what a rank does; travels as JSON.

    Args:
        folder: shared by all nodes.
        resume: as the Trainer's.
        victim: the rank that something happens to at the interrupted step; -1 is none.
        kills_itself: what happens: it kills itself, once; or its node is to be lost.
        dtype: of the model.
    """

    folder: str
    resume: bool | str = False
    victim: int = -1
    kills_itself: bool = True
    dtype: str = "float64"

    @property
    def scenario(self) -> Scenario:
        """Return the run's scenario."""
        return dataclasses.replace(SCENARIO, dtype=self.dtype)

    def schedule(self, step: float, max_steps: int) -> float:
        """Return the learning rate's factor; here the victim meets its fate."""
        fate = Path(self.folder) / ("died" if self.kills_itself else "lost")
        if (
            os.environ["RANK"] == str(self.victim)
            and round(step) == INTERRUPTED_STEP
            and not fate.exists()
        ):
            fate.touch()
            if self.kills_itself:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return slow_start(step, max_steps)


def train_here(run: Run) -> Outcome:
    """Train to the end, as one rank."""
    scenario = run.scenario
    with make_trainer(
        scenario,
        scenario.policy(),
        folder=run.folder,
        resume=run.resume,
        checkpoint_every_epochs=1,
        cache_folder=run.folder,
        step_timeout_s=30.0,
        setup_timeout_s=60.0,
        learning_rate_schedule=run.schedule,
    ) as trainer:
        trainer.fit()
        outcome = collect(trainer, [])
        outcome.extra["cache_files"] = cache_files(run.folder)
        return outcome


def cache_files(folder: str) -> list[str]:
    """Return the numbers (inodes) of the files in a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[4] for line in lines if folder in line})


def main(run: Run) -> None:
    """Be a rank under torchrun."""
    outcome = train_here(run)
    (Path(run.folder) / f"rank{os.environ['RANK']}").write_bytes(pickle.dumps(outcome))


def script(run: Run) -> tuple[str, ...]:
    """Return what torchrun starts."""
    return "-m", "tests.invariants.test_multi_node", json.dumps(dataclasses.asdict(run))


def outcomes(folder: Path, num_ranks: int) -> list[Outcome]:
    """Read what the ranks brought home."""
    found: list[Outcome] = [
        pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(num_ranks)
    ]
    found[0].losses = recorded_losses(folder)
    return found


def recorded_losses(folder: Path) -> list[float]:
    """Return each step's loss; where a step was trained again, that of the last time."""
    steps = [r for r in read_records(folder / RECORDS_FILE) if r["kind"] == "step"]
    losses = {record["step"]: record["loss"] for record in steps}
    assert sorted(losses) == list(range(len(losses)))
    assert [record["step"] for record in steps].count(0) == 1, "the run started anew"
    return [losses[step] for step in range(len(losses))]


@pytest.mark.slow
def test_two_nodes_train_as_a_plain_loop_does(tmp_path: Path) -> None:
    run = script(Run(str(tmp_path)))
    nodes = Cluster([torchrun(node, 2, *run) for node in range(2)], str(tmp_path))
    assert run_nodes(nodes) == [0, 0], logs(tmp_path)
    ranks = outcomes(tmp_path, 4)
    assert [
        (entry["step"], entry["length"], entry["replicas"], entry["frozen"])
        for entry in ranks[0].extra["transitions"]
    ] == [(5, 1, 4, 2)]
    assert_equal(merge(ranks), plain(SCENARIO))
    # The ranks of a node share one file, and each node has its own.
    files = [rank.extra["cache_files"] for rank in ranks]
    assert [len(own) for own in files] == [1, 1, 1, 1]
    assert files[0] == files[1] != files[2] == files[3] and ranks[0].extra["hits"] >= NUM_SAMPLES
    assert len(list((tmp_path / "checkpoints").glob("step-*/manifest.json"))) == 2


@pytest.mark.slow
def test_the_other_node_alone_finishes_the_run_of_a_lost_one(tmp_path: Path) -> None:
    run = Run(str(tmp_path), victim=3, kills_itself=False)
    nodes = Cluster(
        [torchrun(node, 2, *script(run)) for node in range(2)], str(tmp_path), lost_node=1
    )
    assert run_nodes(nodes) == [1, -signal.SIGKILL], logs(tmp_path)
    alone = script(dataclasses.replace(run, resume="auto"))
    assert run_nodes(Cluster([torchrun(0, 1, *alone)], str(tmp_path))) == [0], logs(tmp_path)
    assert_equal(merge(outcomes(tmp_path, 2)), plain(SCENARIO))


@pytest.mark.slow
def test_a_lost_node_that_comes_back_is_met_by_the_one_that_waits(
    two_nodes_uninterrupted: Outcome, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), resume="auto", victim=2, kills_itself=False, dtype="float32")
    nodes = Cluster(
        [torchrun(node, 2, *script(run), restarts=1) for node in range(2)],
        str(tmp_path),
        lost_node=1,
        comes_back=True,
    )
    assert run_nodes(nodes) == [0, 0], logs(tmp_path)
    assert_same_bits(merge(outcomes(tmp_path, 4)), two_nodes_uninterrupted)


@pytest.mark.slow
def test_torchrun_restarts_both_nodes_after_a_killed_rank_with_the_same_bits(
    two_nodes_uninterrupted: Outcome, tmp_path: Path
) -> None:
    run = Run(str(tmp_path), victim=3, dtype="float32")
    nodes = Cluster(
        [torchrun(node, 2, *script(run), restarts=1) for node in range(2)], str(tmp_path)
    )
    assert run_nodes(nodes) == [0, 0], logs(tmp_path)
    assert (tmp_path / "died").exists()
    assert_same_bits(merge(outcomes(tmp_path, 4)), two_nodes_uninterrupted)


@pytest.mark.slow
def test_unequal_nodes_are_refused_by_both_before_anything_starts(tmp_path: Path) -> None:
    run = script(Run(str(tmp_path)))
    commands = [torchrun(node, 2, *run, slots=2 - node) for node in range(2)]
    assert run_nodes(Cluster(commands, str(tmp_path), deadline_s=60.0)) == [1, 1], logs(tmp_path)
    for node in range(2):
        said = (tmp_path / f"node{node}.log").read_text()
        assert "the 3 processes are not spread evenly over nodes" in said, said
    assert not (tmp_path / RECORDS_FILE).exists()


@pytest.mark.slow
def test_elastic_launchers_go_on_without_the_lost_node_by_themselves(tmp_path: Path) -> None:
    run = script(Run(str(tmp_path), resume="auto", victim=3, kills_itself=False))
    nodes = Cluster(
        [elastic_torchrun(node, *run) for node in range(2)], str(tmp_path), lost_node=1
    )
    assert run_nodes(nodes) == [0, -signal.SIGKILL], logs(tmp_path)
    assert_equal(merge(outcomes(tmp_path, 2)), plain(SCENARIO))


@pytest.fixture
def two_nodes_uninterrupted(four_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Train on two emulated nodes, without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    whole = merge(four_ranks.run(train_here, Run(str(folder), dtype="float32"), timeout_s=240.0))
    return dataclasses.replace(whole, losses=recorded_losses(folder))


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))

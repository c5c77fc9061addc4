"""Prove that the scripts for Slurm and for ssh start every node, and end them together.

ssh, srun and scontrol are stubs that run the command here; the nodes meet in a network of their
own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from torchvision.transforms import v2

from experiments.cluster.train_vit import images, main
from pipetransformer.report.records import RECORDS_FILE, read_records
from tests.helpers.marks import slow
from tests.helpers.measured import measuring, never
from tests.helpers.nodes import ROOT, Cluster, logs, run_nodes

CLUSTER = ROOT / "experiments" / "cluster"
SCRIPTS = [CLUSTER / "slurm.sh", CLUSTER / "ssh.sh"]

SSH = """#!/bin/bash
# Let a login shell run the line, as sshd does; a host named "down" cannot be reached.
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
host=$1; shift
[[ $host == down ]] && exit 255
exec sh -c "$*"
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & done
for ((node = 0; node < SLURM_NNODES; node++)); do wait -n || exit; done
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && echo 127.0.0.1 && echo "${3#*,}"
[[ $1 == requeue ]] && echo "$2" > "$REQUEUED"
"""
HELLO = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], "rank" + os.environ["RANK"]).write_text(
    " ".join(os.environ.get(name, "-") for name in sys.argv[2:]))
while pathlib.Path(sys.argv[1], "stay").exists():
    if os.environ["RANK"] == "1" and pathlib.Path(sys.argv[1], "fail").exists() \\
            and pathlib.Path(sys.argv[1], "rank0").exists():
        sys.exit(3)
    time.sleep(0.05)
"""
KILL = '"$@" & job=$!; until [[ -e $0/rank1 ]]; do sleep 0.1; done; kill -KILL $job; wait $job'
LAUNCHERS = 'cat /proc/[0-9]*/cmdline 2>/dev/null | grep --text --quiet "[d]istributed.run"'
"""Tells whether a launcher runs on this node."""


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose PATH begins with the stubs, and with this interpreter."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "hello.py").write_text(HELLO)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "MAX_RESTARTS": "0",
        "REQUEUED": str(tmp_path / "requeued"),
    }


def script(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a script."""
    return ["bash", str(CLUSTER / name), *map(str, arguments)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_proper_bash_and_says_how_it_is_used(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    asked = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
    assert asked.returncode == 2 and "usage: " in asked.stderr


@pytest.mark.slow
def test_ssh_starts_a_launcher_on_every_host_with_the_settings(
    tmp_path: Path, stubs: dict[str, str]
) -> None:
    (tmp_path / "hosts").write_text("# two nodes\n127.0.0.1  # the head\n\nuser@localhost\n")
    names = ("WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    cluster = Cluster(
        [script("ssh.sh", tmp_path / "hosts", 2, tmp_path / "hello.py", tmp_path, *names)],
        str(tmp_path),
    )
    assert run_nodes(cluster, stubs) == [0], logs(tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert said == {f"rank{rank}": f"4 {rank // 2} 1 lo" for rank in range(4)}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("down", 255),
        slow("fail", 1),
        slow("kill", 137),
    ],
)
def test_ssh_ends_all_launchers_when_one_fails_or_it_is_killed_itself(
    tmp_path: Path, stubs: dict[str, str], ending: str, code: int
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1\n" + ("down" if ending == "down" else "localhost"))
    (tmp_path / "stay").touch()
    (tmp_path / ending).touch()
    starts = script("ssh.sh", tmp_path / "hosts", 1, tmp_path / "hello.py", tmp_path)
    if ending == "kill":
        starts = ["bash", "-c", KILL, str(tmp_path), *starts]
    # A launcher that is left behind would stay as long as the file `stay` does.
    then = f'"$@"; code=$?; while {LAUNCHERS}; do sleep 0.2; done; exit $code'
    cluster = Cluster([["bash", "-c", then, "-", *starts]], str(tmp_path), deadline_s=60.0)
    assert run_nodes(cluster, stubs) == [code], logs(tmp_path)
    said = logs(tmp_path)
    assert ending == "kill" or f"ended with status {code}; the others are ended" in said, said


@pytest.mark.slow
def test_slurm_starts_a_launcher_on_every_node(tmp_path: Path, stubs: dict[str, str]) -> None:
    names = ("WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    cluster = Cluster([script("slurm.sh", tmp_path / "hello.py", tmp_path, *names)], str(tmp_path))
    slurm = {
        "SLURM_JOB_ID": "40007",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "a,b",
        "SLOTS": "2",
    }
    assert run_nodes(cluster, {**stubs, **slurm}) == [0], logs(tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.glob("rank*")}
    assert said == {f"rank{rank}": f"4 {rank // 2} 127.0.0.1 20007" for rank in range(4)}


@pytest.mark.slow
def test_slurm_requeues_the_job_when_its_time_is_nearly_over(
    tmp_path: Path, stubs: dict[str, str]
) -> None:
    """The script hears of it while srun runs, and goes on waiting for srun."""
    (tmp_path / "stay").touch()
    near_the_end = (
        '"$@" & job=$!; until [[ -e $0/rank0 ]]; do sleep 0.1; done; kill -USR1 $job; '
        "until [[ -e $REQUEUED ]]; do sleep 0.1; done; rm $0/stay; wait $job"
    )
    command = [
        "bash",
        "-c",
        near_the_end,
        str(tmp_path),
        "bash",
        str(CLUSTER / "slurm.sh"),
        str(tmp_path / "hello.py"),
        str(tmp_path),
    ]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "a"}
    cluster = Cluster([command], str(tmp_path), deadline_s=60.0)
    assert run_nodes(cluster, {**stubs, **slurm}) == [0], logs(tmp_path)
    assert (tmp_path / "requeued").read_text() == "7\n"


@pytest.mark.slow
def test_two_hosts_train_and_one_goes_on_from_there(tmp_path: Path, stubs: dict[str, str]) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1\nlocalhost\n")
    (tmp_path / "one-host").write_text("127.0.0.1\n")
    for hosts, epochs in (("hosts", 1), ("one-host", 2)):
        command = script(
            "ssh.sh",
            tmp_path / hosts,
            1,
            "-m",
            "experiments.cluster.train_vit",
            "--folder",
            tmp_path / "run",
            "--epochs",
            epochs,
            "--frozen",
            0,
            8,
            "--checkpoint-every-steps",
            19,
        )
        cluster = Cluster([command], str(tmp_path), deadline_s=280.0)
        assert run_nodes(cluster, stubs) == [0], logs(tmp_path)
    records = read_records(tmp_path / "run" / RECORDS_FILE)
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(74))
    assert (tmp_path / "run" / "model.safetensors").exists()


def make_images(folder: Path) -> None:
    """Draw two classes of images."""
    for part, count in (("train", 4), ("val", 2)):
        for label, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (folder / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (40 + number, 32), color).save(
                    folder / part / label / f"{number}.png"
                )


def test_a_folder_of_images_is_read_alike_each_time(tmp_path: Path) -> None:
    make_images(tmp_path)
    problem = images(tmp_path, "vit_tiny_patch16_224", weights=None, seed=0)
    assert (len(problem.train_dataset), len(problem.eval_dataset)) == (8, 4)
    pixels, label = problem.train_dataset[7]
    assert pixels.shape == (3, 224, 224) and label == 1
    assert v2.functional.to_dtype(pixels).equal(problem.train_dataset[7][0])
    assert problem.model.head.out_features == 2


@measuring(never)
@pytest.mark.slow
def test_the_script_trains_alone_on_a_folder_of_images(tmp_path: Path) -> None:
    make_images(tmp_path / "images")
    main(
        [
            "--folder",
            str(tmp_path / "run"),
            "--images",
            str(tmp_path / "images"),
            "--model",
            "vit_tiny_patch16_224",
            "--epochs",
            "1",
            "--batch-size",
            "4",
            "--frozen",
            "0",
            "--checkpoint-every-steps",
            "1",
        ]
    )
    steps = [r for r in read_records(tmp_path / "run" / RECORDS_FILE) if r["kind"] == "step"]
    assert len(steps) == 2 and json.dumps(steps)

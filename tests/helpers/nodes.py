"""Run launchers as the nodes of a cluster, in a network and among processes of their own.

    unshare                       its network has a loopback and nothing else; what it started
      python -m tests.helpers.nodes       ends with it
        unshare                   a node: killing it ends all its processes at once, as a power
          torchrun ...            cut does

torchrun's store listens on all interfaces, and here these are the loopback alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORT = 29500
"""Any port is free in a network of one's own."""

_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_NETWORK = (*_PROCESSES, "--net", "--user", "--map-root-user")
_POLL_S = 0.05
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


@dataclass(frozen=True)
class Cluster:
    """Describe what to run.

    Args:
        commands: of each node.
        folder: where each node's output goes, node0.log, node1.log, ...
        lost_node: the node that is killed as soon as the folder holds a file `lost`.
        comes_back: whether its command is run once more then.
        deadline_s: what still runs then is killed.
    """

    commands: Sequence[Sequence[str]]
    folder: str
    lost_node: int | None = None
    comes_back: bool = False
    deadline_s: float = 240.0


def torchrun(
    node: int, num_nodes: int, *script: str, slots: int = 2, restarts: int = 0
) -> list[str]:
    """Return the command that starts a script's ranks on a node."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={slots}",
        "--master-addr=127.0.0.1",
        f"--master-port={PORT}",
        f"--max-restarts={restarts}",
        *script,
    ]


def elastic_torchrun(node: int, *script: str, slots: int = 2, restarts: int = 3) -> list[str]:
    """Return the command that starts a script's ranks on one of up to two nodes.

    The launchers agree on who is there, and go on without a node that is lost. They tell each
    other apart by address and process id, which alone would be the same on each node here.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1:2",
        f"--nproc-per-node={slots}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{PORT}",
        "--rdzv-id=test",
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr=127.0.0.{node + 1}",
        *script,
    ]


def require_a_network() -> None:
    """Skip the test where a user may not have a network of their own."""
    try:
        tried = subprocess.run([*_NETWORK, "true"], capture_output=True, text=True, timeout=30)
        refusal = tried.stderr if tried.returncode else ""
    except OSError as error:
        refusal = str(error)
    if refusal:
        pytest.skip(f"no network of its own can be had here: {refusal.strip()}")


def run_nodes(cluster: Cluster, environment: Mapping[str, str] | None = None) -> list[int | None]:
    """Run every node's command to its end; return their exit statuses.

    A node that was killed has None, and -9 where the test itself killed it as lost.
    """
    require_a_network()
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "PIPETRANSFORMER", "MASTER_"))
    }
    temporary = Path(cluster.folder) / "tmp"  # torchrun leaves folders behind when it is killed.
    temporary.mkdir(parents=True, exist_ok=True)
    ran = subprocess.run(
        [*_NETWORK, sys.executable, "-m", "tests.helpers.nodes", json.dumps(asdict(cluster))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=cluster.deadline_s + 30,
        env={
            **ours,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(temporary),
            **(environment or {}),
        },
    )
    assert ran.returncode == 0, ran.stderr
    codes: list[int | None] = json.loads(ran.stdout)
    return codes


def logs(folder: Path) -> str:
    """Return the end of what every node printed, for an assertion's message."""
    return "\n".join(
        f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("node*.log"))
    )


def raise_loopback() -> None:
    """Bring the loopback of a fresh network up, as `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sH14x", answer)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))


def start(cluster: Cluster, node: int) -> subprocess.Popen[bytes]:
    """Start a node; what it prints goes to its log, after what an earlier start printed."""
    with open(Path(cluster.folder) / f"node{node}.log", "ab") as log:
        return subprocess.Popen(
            [*_PROCESSES, *cluster.commands[node]], stdout=log, stderr=subprocess.STDOUT
        )


def watch(cluster: Cluster) -> list[int | None]:
    """Run the nodes, lose the one to be lost, and kill what is left at the deadline."""
    nodes = [start(cluster, node) for node in range(len(cluster.commands))]
    lost, to_lose = Path(cluster.folder) / "lost", cluster.lost_node
    deadline = time.monotonic() + cluster.deadline_s
    while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        if to_lose is not None and lost.exists():
            nodes[to_lose].kill()
            nodes[to_lose].wait()
            if cluster.comes_back:
                nodes[to_lose] = start(cluster, to_lose)
            to_lose = None
        time.sleep(_POLL_S)
    codes = [node.poll() for node in nodes]
    for node in nodes:
        node.kill()
        node.wait()
    return codes


if __name__ == "__main__":
    raise_loopback()
    sys.stdout.write(json.dumps(watch(Cluster(**json.loads(sys.argv[1])))))

"""Start one process per device slot on this machine, and end them together.

For several nodes, and for restarts, start the same script with torchrun instead. Processes meet
through a file and talk over the loopback interface, so that nothing listens for strangers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipetransformer.world import STORE_VARIABLE

_GRACE_S = 2.0
_NEIGHBOURS_S = 0.2
"""How long a killed process may take to become visible after its neighbours noticed."""


class WorkerFailedError(RuntimeError):
    """Name the rank that ended a run, and how it ended."""


def launch(entry: Callable[..., None], arguments: Sequence[Any] = (), *, num_slots: int,
           cores_per_slot: int = 1) -> None:
    """Run a function in `num_slots` processes and return when all have ended.

    Args:
        entry: an importable function; it finds its place through the environment, as under
            torchrun.
        arguments: passed to it.
        num_slots: processes to start.
        cores_per_slot: CPU threads of each.
    Raises:
        ValueError: there is no slot, or none of its cores.
        WorkerFailedError: a process failed or was killed; the others have been ended.
    """
    if num_slots < 1 or cores_per_slot < 1:
        raise ValueError(f"num_slots is {num_slots} and cores_per_slot {cores_per_slot}; both "
                         "must be at least 1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pipetransformer-") as folder:
        processes: list[BaseProcess] = []
        try:
            for rank in range(num_slots):
                environment = _environment(rank, num_slots, cores_per_slot, Path(folder))
                processes.append(context.Process(
                    target=_enter, args=(entry, tuple(arguments), environment),
                    name=f"rank{rank}"))
                # The thread count must be in the environment before the child imports torch.
                _start_with(environment, processes[-1])
            _watch(processes, Path(folder))
        finally:
            _end(processes)


def _environment(rank: int, num_slots: int, cores: int, folder: Path) -> dict[str, str]:
    environment = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_slots),
        "LOCAL_WORLD_SIZE": str(num_slots), "OMP_NUM_THREADS": str(cores),
        "MKL_NUM_THREADS": str(cores), STORE_VARIABLE: str(folder / "store")}
    if sys.platform == "linux":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return environment


def _start_with(environment: dict[str, str], process: BaseProcess) -> None:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _enter(entry: Callable[..., None], arguments: tuple[Any, ...],
           environment: dict[str, str]) -> None:
    os.environ.update(environment)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        entry(*arguments)
    except Exception:
        rank = environment["RANK"]
        with suppress(OSError):  # Another rank failed first, or the launcher is gone.
            os.symlink(rank, _first_failure(Path(environment[STORE_VARIABLE]).parent))
        sys.stderr.write(f"[rank {rank}] {traceback.format_exc()}")
        sys.stderr.flush()
        # Other ranks' waits may never end, and so may this one's clean-up: leave at once.
        os._exit(1)


def _first_failure(folder: Path) -> Path:
    """Name the link that holds the rank that failed first; making it is atomic."""
    return folder / "first-failure"


def _leave_with_parent() -> None:
    """End this process when its parent has gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _watch(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Wait until all have ended well, or one has not."""
    running = dict(enumerate(processes))
    while running:
        ended = wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            if process.sentinel in ended:
                process.join()
                del running[rank]
                if process.exitcode:
                    raise WorkerFailedError(
                        _describe(_first_cause(processes, rank, folder), processes))


def _first_cause(processes: Sequence[BaseProcess], rank: int, folder: Path) -> int:
    """Prefer a killed rank, then the first that failed, over those that failed because of it.

    An abort is how gloo and NCCL may end a process whose neighbour is gone: no cause by itself.
    """
    time.sleep(_NEIGHBOURS_S)
    killed = [r for r, process in enumerate(processes)
              if (process.exitcode or 0) < 0 and process.exitcode != -signal.SIGABRT]
    if killed:
        return killed[0]
    link = _first_failure(folder)
    first = int(os.readlink(link)) if link.is_symlink() else rank
    processes[first].join(_GRACE_S)
    return rank if processes[first].exitcode is None else first


def _describe(rank: int, processes: Sequence[BaseProcess]) -> str:
    code, pid = processes[rank].exitcode, processes[rank].pid
    assert code is not None
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else \
        f"failed (exit status {code}; what it printed is above)"
    return (f"rank {rank} of {len(processes)} (process {pid}) {how}; the other ranks have been "
            "ended. A run with checkpoints continues with resume=True")


def _end(processes: Sequence[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()

"""Start one process per device slot on this machine, end them together, and start them again.

For several nodes use torchrun. Processes meet through a file and talk over the loopback interface,
so that nothing listens for strangers. They end with their launcher, however it ends. A launcher
that is killed leaves the folder of that file behind, a few hundred bytes.

    rank 0   ----------- waits, fails |            ------------------- ends
    rank 1   ----- killed             |            ------------------- ends
    launcher ...... names rank 1, ends all, starts all again ......... returns
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from uuid import uuid4

import torch

from autodp import PeerError
from pipetransformer.errors import WorkerFailedError
from pipetransformer.processes.world import STORE_VARIABLE

_RESTART_VARIABLE = "PIPETRANSFORMER_RESTART_COUNT"
_LAUNCH_VARIABLE = "PIPETRANSFORMER_LAUNCH"
"""Names one call of `launch`; its restarts share the name."""

_LOGGER = logging.getLogger(__name__)
_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
_PRELOADED = ["pipetransformer", "torch._dynamo"]
"""What a fork server imports; torch imports the second when the first optimizer is built."""
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Queues of a GPU that its streams share, 8 by default and 32 at most. Beside its own, a stage has
streams for messages both ways to both neighbours, for sums, copies and rows."""
_GRACE_S = 2.0
_FAILURE, _CONSEQUENCE = "first-failure", "first-consequence"
"""Links to the first rank that failed by itself, and to the first that failed due to another."""
_INTERRUPTED, _INTERRUPT_S = "interrupted", 10.0
"""The file in which a rank says where Ctrl-C has stopped it, and how long all may take to end."""
_NEIGHBOURS_S = 0.2
"""How long a killed process may take to become visible after its neighbours noticed."""


def launch(
    entry: Callable[..., None],
    arguments: Sequence[Any] = (),
    *,
    num_slots: int,
    cores_per_slot: int = 1,
    max_restarts: int = 0,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> None:
    """Run a function in `num_slots` processes and return when all have ended.

    Any failure ends all of them and, as torchrun does, starts all again. That includes an error in
    the user's code, as the machine may have caused it. A run with checkpoints then continues.

    Args:
        entry: an importable function; its environment is torchrun's, and
            PIPETRANSFORMER_RESTART_COUNT is the number of restarts so far.
        cores_per_slot: CPU threads of each process.
        start_method: "spawn" starts a new interpreter for each process. "forkserver" forks them
            from one that has imported this package, which saves seconds at every start. Their
            output goes where the first launch's did. A process that a signal has stopped outlives
            a launcher that is killed.
    Raises:
        ValueError: a number is too small.
        KeyboardInterrupt: Ctrl-C was pressed; all have been ended, and it says where rank 0 stood.
        WorkerFailedError: a process failed once more than restarts are allowed; the others have
            been ended.
    """
    if num_slots < 1 or cores_per_slot < 1 or max_restarts < 0:
        raise ValueError(
            f"num_slots is {num_slots}, cores_per_slot {cores_per_slot} and max_restarts "
            f"{max_restarts}; slots and cores must be at least 1, restarts at least 0"
        )
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(_PRELOADED)
    name = uuid4().hex
    with _cleaning_up_after_sigterm():
        for restarts in range(max_restarts + 1):
            extra = {_LAUNCH_VARIABLE: name, _RESTART_VARIABLE: str(restarts)}
            cause = _run(context, partial(entry, *arguments), num_slots, cores_per_slot, extra)
            if cause is None:
                return
            if restarts < max_restarts:
                _LOGGER.warning(
                    f"{cause}; all ranks have been ended and are started again (restart "
                    f"{restarts + 1} of {max_restarts})"
                )
    again = f" after {max_restarts} restart(s)" if max_restarts else ""
    raise WorkerFailedError(
        f"{cause}{again}; the other ranks have been ended. A run with "
        "checkpoints continues with resume='auto'"
    )


def is_restarted() -> bool:
    """Return whether a launcher may have started this process again.

    Under torchrun that is always so; `launcher_name` then tells whose run it is.
    """
    # torchrun counts restarts by node, so a restarted node's count may still be 0.
    counted = os.environ.get(_RESTART_VARIABLE, "0") != "0"
    return counted or "TORCHELASTIC_RESTART_COUNT" in os.environ


def launcher_name() -> str:
    """Identify the launcher of this process; its restarts get the same name."""
    parent = os.getppid()
    # Its start time, as the kernel uses process numbers again.
    started = "".join(_system_facts(parent)[19:20])
    # And the call, as a process may launch one run after the other.
    launch = os.environ.get(_LAUNCH_VARIABLE, "")
    return f"{socket.gethostname()} {parent} {started} {launch}".strip()


def _run(
    context: Any, work: Callable[[], None], num_slots: int, cores: int, extra: Mapping[str, str]
) -> str | None:
    """Start all ranks and wait for them; return what ended them early, or None."""
    with tempfile.TemporaryDirectory(prefix="pipetransformer-") as folder:
        environment = {**_environment(num_slots, cores, Path(folder)), **extra}
        processes: list[BaseProcess] = [
            context.Process(target=_enter, args=(work, rank, environment), name=f"rank{rank}")
            for rank in range(num_slots)
        ]
        try:
            # The thread count must be in the environment before a child imports torch.
            with _applied(environment):
                for process in processes:
                    process.start()
            return _watch(processes, Path(folder))
        except KeyboardInterrupt as error:
            # A terminal's Ctrl-C has reached the ranks as well; they may still be saving.
            _join(processes, _INTERRUPT_S)
            with suppress(OSError):
                error.args = ((Path(folder) / _INTERRUPTED).read_text(),)
            raise
        finally:
            _end(processes)


def _environment(num_slots: int, cores: int, folder: Path) -> dict[str, str]:
    environment = {
        "WORLD_SIZE": str(num_slots),
        "LOCAL_WORLD_SIZE": str(num_slots),
        "OMP_NUM_THREADS": str(cores),
        "MKL_NUM_THREADS": str(cores),
        _CONNECTIONS: os.environ.get(_CONNECTIONS, "32"),
        STORE_VARIABLE: str(folder / "store"),
    }
    if sys.platform == "linux":
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return environment


@contextmanager
def _applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process's environment meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


def _enter(work: Callable[[], None], rank: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # A forked process has torch already, with the server's thread count.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    _leave_with_parent()
    try:
        work()
    except KeyboardInterrupt as error:
        if error.args:
            # The launcher says it, below all that the ranks print.
            with suppress(OSError):
                (Path(environment[STORE_VARIABLE]).parent / _INTERRUPTED).write_text(str(error))
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        name = _CONSEQUENCE if isinstance(error, PeerError) else _FAILURE
        with suppress(OSError):  # Another rank was first, or the launcher is gone.
            # Making a link is atomic, so the first one stays.
            os.symlink(str(rank), Path(environment[STORE_VARIABLE]).parent / name)
        sys.stderr.write(f"[rank {rank}] {traceback.format_exc()}")
        sys.stderr.flush()
        # Cleaning up could wait for other ranks for ever, so leave at once.
        os._exit(1)


def _leave_with_parent() -> None:
    """End this process when its parent has gone, however it went."""
    if sys.platform == "linux":
        # The kernel does it where the thread below cannot run: stopped, or stuck in native code.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _cleaning_up_after_sigterm() -> Iterator[None]:
    """Let a SIGTERM end this process as an exit does, with its ranks and files."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Only the main thread may set a handler, and a user's own stays.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(processes: Sequence[BaseProcess], folder: Path) -> str | None:
    """Wait until all processes have ended well, or one has failed; say which, and how."""
    while True:
        codes = [process.exitcode for process in processes]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            return _describe(_first_cause(processes, failed[0], folder), processes)
        if None not in codes:
            return None
        running = (p for p, code in zip(processes, codes, strict=True) if code is None)
        wait([process.sentinel for process in running])


def _first_cause(processes: Sequence[BaseProcess], rank: int, folder: Path) -> int:
    """Prefer a killed rank, then a stopped one, then the first that failed by itself."""
    time.sleep(_NEIGHBOURS_S)
    codes = [process.exitcode or 0 for process in processes]
    # gloo and NCCL may abort a process whose neighbour is gone, so an abort is no cause.
    killed = [r for r, code in enumerate(codes) if code < 0 and code != -signal.SIGABRT]
    stopped = [
        r
        for r, process in enumerate(processes)
        if process.exitcode is None and _system_facts(process.pid)[:1] == ["T"]
    ]
    if killed or stopped:
        return (killed or stopped)[0]
    links = [link for name in (_FAILURE, _CONSEQUENCE) if (link := folder / name).is_symlink()]
    first = int(os.readlink(links[0])) if links else rank
    processes[first].join(_GRACE_S)
    return rank if processes[first].exitcode is None else first


def _system_facts(pid: int | None) -> list[str]:
    """Return the fields after the name in /proc/PID/stat, the state first; [] without Linux."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _describe(rank: int, processes: Sequence[BaseProcess]) -> str:
    code, pid = processes[rank].exitcode, processes[rank].pid
    if code is None:
        how = "was stopped by a signal, and another rank waited for it in vain"
    elif code < 0:
        names = {one.value: one.name for one in signal.Signals}  # Real-time ones have none.
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    else:
        how = f"failed (exit status {code}; what it printed is above)"
    return f"rank {rank} of {len(processes)} (process {pid}) {how}"


def _end(processes: Sequence[BaseProcess]) -> None:
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    _join(alive, _GRACE_S)
    for process in alive:
        if process.is_alive():
            process.kill()  # This ends a stopped process too.
            process.join()


def _join(processes: Sequence[BaseProcess], patience_s: float) -> None:
    """Wait for processes that have started, for this long in all."""
    deadline = time.monotonic() + patience_s
    for process in processes:
        if process.is_alive():
            process.join(max(0.0, deadline - time.monotonic()))

"""Keep worlds of real gloo processes alive between tests, so that a test pays for its work and not
for imports.

All of a session's processes are forks of one that has imported the package and computed nothing:
eight of them start in a second, also after a failure.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipetransformer.processes.launcher import _applied, _environment

_PATIENCE_STEPS = 1e5
"""Steps for which training waits for the save before: as long as it takes."""


def suit_tests() -> None:
    """Have this process wait for every save, as steps of tests are too short for any, but for no
    disk. Have it measure briefly and seldom, and try an optimizer once: what the planner is told
    about tiny models takes longer than all their training.
    """
    import torch

    from pipetransformer.checkpoint import run_state
    from pipetransformer.checks import model_checks
    from pipetransformer.elastic import elasticity
    from pipetransformer.measure import link_times, measurements, reading_times, timing
    from tests.helpers.measured import kept
    from tests.helpers.trials import try_once

    os.fsync = _fsync_in_tests
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        # Each seed notes the whole stack three times, for an error of GPUs that are not there.
        backend.traceback = SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]
    run_state._PATIENCE_STEPS = _PATIENCE_STEPS
    timing._DISPLACING_BYTES = 1 << 12
    link_times._TURNS = measurements._MOST_ROUNDS = 1
    reading_times._NUM_ROWS, reading_times._FETCHED = 8, 4
    elasticity.measure = kept
    model_checks.try_optimizer = try_once
    gc.freeze()  # What is imported stays; looking at it again and again takes seconds.


def _fsync_in_tests(descriptor: int) -> None:
    """Refuse what is no open file, and wait for no disk: a test's files outlive no power cut.

    Waiting took a twelfth of all time.
    """
    os.fstat(descriptor)


def prepared() -> ForkServerContext:
    """Return what starts processes that have imported the package; it is one for the session."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    return context


def another_process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Make a process that calls function(*arguments) in this one's environment, of no world."""
    return prepared().Process(target=_call, args=(dict(os.environ), function, arguments))


def _call(
    environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # Its own is that with which the server was started, for the first rank of some pool.
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


class WorkerError(AssertionError):
    """Carry the tracebacks of the ranks that failed."""


class Pool:
    """Run functions on every rank of a world of processes that share one default group.

    A world in which a rank failed or hung is ended, as its ranks no longer stand at the same
    point; the next call starts another.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0
    ) -> list[Any]:
        """Call function(*arguments) on every rank; return the results in rank order.

        Raises:
            WorkerError: a rank raised, died, or did not answer in time.
        """
        if not self._workers:
            self._start()
        try:
            for _, connection in self._workers:
                _send(connection, (function, arguments))
            deadline = time.monotonic() + timeout_s
            answers = [self._answer(rank, deadline) for rank in range(self.num_ranks)]
            failures = [text for good, text in answers if not good]
            if failures:
                raise WorkerError("\n".join(failures))
        except BaseException:
            self.close()
            raise
        return [value for _, value in answers]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = prepared()
        self._folder = tempfile.TemporaryDirectory(prefix="pipetransformer-test-")
        for rank in range(self.num_ranks):
            environment = _environment(self.num_ranks, 1, Path(self._folder.name))
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # What is imported beforehand must be what these tests import.
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            # The server starts with the first process, and imports with its number of threads.
            with _applied(environment):
                process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        _, connection = self._workers[rank]
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return _receive(connection)
        except (EOFError, ConnectionResetError):
            return False, f"[rank {rank}] died"
        return False, f"[rank {rank}] did not answer in time"


def _send(connection: Connection, value: Any) -> None:
    # By value: torch would have connections share each tensor's memory, and open a file for it.
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _leave_groups() -> None:
    """Leave what an interrupted run has left open, as its process was to end: all groups but the
    world's. Each keeps three threads, one of which polls.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from pipetransformer.processes.world import connect

    suit_tests()
    torch.set_num_threads(1)
    connect("cpu", timeout_s=60.0)
    while True:
        try:
            function, arguments = _receive(connection)
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            _send(connection, (True, function(*arguments)))
            _leave_groups()
        except Exception:
            _send(connection, (False, f"[rank {environment['RANK']}] {traceback.format_exc()}"))

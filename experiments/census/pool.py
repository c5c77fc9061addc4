"""Try subjects in worker processes: a crash or a hang of one class ends that class alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from experiments.census.judge import Outcome
from experiments.census.subjects import Subject

LIMIT_S = 600.0
"""How long a class may take where a job says nothing else, on two processes as well."""


@dataclass(frozen=True)
class Job:
    """Give a worker what to try."""

    subject: Subject
    judge: Callable[[Subject], Outcome]
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Tried:
    """Hold a subject, its outcome and how long it took."""

    subject: Subject
    outcome: Outcome
    seconds: float


class _Worker:
    """Hold a process that tries one job after the other, and the job it is at."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # Not a daemon, as it starts two ranks.
        self.process = context.Process(target=_work, args=(theirs,))
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.since = 0.0

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.connection.send(job)

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def tried(jobs: Sequence[Job], num_workers: int) -> Iterator[Tried]:
    """Yield each job's outcome as it ends."""
    waiting = list(reversed(jobs))
    workers = [_Worker() for _ in range(min(num_workers, len(jobs)))]
    try:
        while waiting or any(worker.job for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.pop())
            ready = wait([worker.connection for worker in workers if worker.job], timeout=1.0)
            for place, worker in enumerate(workers):
                outcome = _outcome_of(worker, ready)
                if worker.job is None or outcome is None:
                    continue
                yield Tried(worker.job.subject, outcome, time.monotonic() - worker.since)
                worker.job = None
                if outcome.detail == "ended":
                    worker.end()
                    workers[place] = _Worker()
    finally:
        for worker in workers:
            worker.end()


def _outcome_of(worker: _Worker, ready: Sequence[object]) -> Outcome | None:
    """Return a worker's outcome; None while it is at work."""
    if worker.connection in ready:
        try:
            outcome: Outcome = worker.connection.recv()
        except EOFError:
            return Outcome("crash", "its process ended", "ended")
        return outcome
    if worker.job and time.monotonic() - worker.since > worker.job.limit_s:
        return Outcome("crash", f"it took more than {worker.job.limit_s:.0f} s", "ended")
    return None


def _work(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Both errors: the census has ended, or has been killed.
    with connection, suppress(EOFError, OSError):
        while True:
            job: Job = connection.recv()
            connection.send(job.judge(job.subject))

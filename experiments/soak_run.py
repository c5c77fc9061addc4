"""Be one rank of a run that is killed, and write down where it was struck."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.soak_programs import train_a_stream, train_by_trainer

ERRORS = "errors"
"""Holds what the ranks of a run printed."""

KILLED = "killed"
"""Holds where each kill struck."""

PIDS = "pids"
"""Holds the ranks' processes, of all attempts."""

ATTEMPTS = "attempts"
"""Holds when each attempt of a run began."""

_PACKAGES = tuple(
    f"{os.sep}{name}{os.sep}"
    for name in ("pipetransformer", "freeze", "autopipe", "autodp", "autocache")
)


@dataclass(frozen=True)
class Kill:
    """Say when a rank is killed: after a time, or at a call of a function.

    Args:
        rank: which.
        after_s: seconds of this process's life; None where it is a function.
        function: as `Calls` names it.
        call: which call of it, from 0.
        event: "call" or "return".
    """

    rank: int
    after_s: float | None = None
    function: str = ""
    call: int = 0
    event: str = "call"


@dataclass(frozen=True)
class SoakRun:
    """Describe a run.

    Args:
        folder: takes its checkpoints, its records and its notes.
        num_ranks: a key of LENGTHS.
        kills: one for each attempt; later attempts live to the end.
        counts: whether to count the calls of every function, which takes time.
        program: what it trains, a key of PROGRAMS.
    """

    folder: str
    num_ranks: int
    kills: tuple[Kill, ...] = ()
    counts: bool = False
    program: str = "trainer"


class Calls:
    """Follow the calls of the packages' functions in all threads, and act at one of them."""

    def __init__(
        self, kill: Kill | None = None, strike: Callable[[str], None] | None = None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._kill = kill
        self._strike = strike

    def follow(self) -> None:
        """Begin, in this thread and in those that it will start."""
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        """End it, in this thread and in those to come."""
        sys.setprofile(None)
        threading.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Take a call or a return; the interpreter calls it."""
        code = frame.f_code
        if event not in ("call", "return") or not any(p in code.co_filename for p in _PACKAGES):
            return
        name = _name(frame)
        if event == "call":
            self.counts[name] += 1
        kill = self._kill
        if (
            kill
            and self._strike
            and (name, event) == (kill.function, kill.event)
            and self.counts[name] == kill.call + 1
        ):
            self._strike(name)


def train(run: SoakRun) -> None:
    """Train as one rank; an attempt with a kill in store may end early."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["PIPETRANSFORMER_RESTART_COUNT"])
    folder, start = Path(run.folder), time.monotonic()
    # What a killed rank's neighbours say about it is what is expected of them.
    sys.stderr = sys.stdout = open(folder / ERRORS, "a", buffering=1)
    with open(folder / PIDS, "a") as file:
        file.write(f"{os.getpid()}\n")
    if rank == 0:
        with open(folder / ATTEMPTS, "a") as file:
            file.write(f"{time.time()}\n")
    kill = run.kills[attempt] if attempt < len(run.kills) else None
    calls = Calls()
    if kill is not None and kill.rank == rank:
        calls = _arm(kill, folder)
    if run.counts:
        calls.follow()
    PROGRAMS[run.program](folder, run.num_ranks)
    if run.counts:
        calls.stop()
        answer = {"seconds": time.monotonic() - start, "calls": calls.counts}
        (folder / f"calls-{rank}.json").write_text(json.dumps(answer))


def _train_by_script(folder: Path, num_ranks: int) -> None:
    # transformers takes seconds to import, which runs of the others would wait at every start.
    from experiments.soak_hf import train_by_script

    train_by_script(folder, num_ranks)


PROGRAMS: dict[str, Callable[[Path, int], None]] = {
    "trainer": train_by_trainer,
    "hf": _train_by_script,
    "stream": train_a_stream,
}


def _arm(kill: Kill, folder: Path) -> Calls:
    """Make this process die as it is told to."""

    def strike(where: str) -> None:
        with open(folder / KILLED, "a") as file:
            file.write(f"{where}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    if kill.after_s is None:
        calls = Calls(kill, strike)
        calls.follow()
        return calls
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(kill.after_s, lambda: strike(_whereabouts(main)))
    timer.daemon = True
    timer.start()
    return Calls()


def _whereabouts(thread: int) -> str:
    """Name the innermost of the packages' functions that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if any(package in frame.f_code.co_filename for package in _PACKAGES):
            return _name(frame)
        frame = frame.f_back
    return "outside of the packages"


def _name(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"

"""Run phases one after the other, each in a process group that is killed at its limit.

A phase's limit is 1.5 times its share, by weight, of the seconds that are left. What it leaves
unused goes to those behind it, and what it takes beyond its share is lost to them. The report is
rewritten around each phase, whole whatever happens.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_check.findings import NO_TIME, OK, Setting, write_whole
from experiments.gpu_check.table import table

REPORT, LOG, TABLE = "report.json", "log.txt", "table.txt"
_ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 40
_OVERRUN = 1.5
"""How many times its share a phase may take: those before others are worth more than they are."""
_ENDING_S = 1.0
"""By which a phase's deadline, as it is told, is earlier than its end."""


@dataclass(frozen=True)
class Phase:
    """Name a phase.

    Args:
        function: "module:name" of what takes the findings and the setting.
        weight: of its share of the seconds that are left.
        least_s: below which it is not begun.
    """

    name: str
    function: str
    weight: float
    least_s: float = 5.0


def run_phases(phases: Sequence[Phase], setting: Setting) -> dict[str, Any]:
    """Run all phases that there is time for; return the report, as it is in the folder `out`.

    Args:
        setting: its deadline is that of all; its scratch is not used.
    """
    out, start = Path(setting.out), time.time()
    out.mkdir(parents=True, exist_ok=True)
    (out / LOG).unlink(missing_ok=True)
    found: dict[str, dict[str, Any]] = {phase.name: {"status": "waiting"} for phase in phases}
    report: dict[str, Any] = {"device": setting.device, "tiny": setting.tiny, "phases": found}

    def write() -> None:
        report["seconds"] = round(time.time() - start, 1)
        write_whole(out / REPORT, report)

    for index, phase in enumerate(phases):
        share = phase.weight / sum(one.weight for one in phases[index:])
        limit_s = setting.left_s * min(1.0, _OVERRUN * share)
        if limit_s < phase.least_s:
            found[phase.name] = {"status": NO_TIME}
            continue
        found[phase.name] = {"status": "running", "limit_s": round(limit_s, 1)}
        write()
        found[phase.name] |= _run_phase(phase, setting, limit_s)
    write()
    (out / TABLE).write_text(table(report))
    return report


def _run_phase(phase: Phase, setting: Setting, limit_s: float) -> dict[str, Any]:
    """Run a phase's process to its end, or to its limit; return what it found."""
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        found, log = Path(folder, "found.json"), Path(folder, "log.txt")
        own = {"deadline": start + limit_s - _ENDING_S, "scratch": folder}
        told = {"function": phase.function, "found": str(found), **asdict(setting), **own}
        # A rehearsal shares its cores, where threads that wait for each other take very long.
        one_thread = {"OMP_NUM_THREADS": "1"} if setting.device == "cpu" else {}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "experiments.gpu_check.phase_process", json.dumps(told)],
                cwd=_ROOT,
                env={**os.environ, **one_thread},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, limit_s)
        printed = log.read_text(errors="replace")
        told_back = json.loads(found.read_text()) if found.exists() else {"lines": []}
    with Path(setting.out, LOG).open("a") as file_of_all:
        file_of_all.write(f"==== {phase.name}\n{printed}\n")
    status = _status(told_back, code)
    tail = [] if status == OK else printed.splitlines()[-_TAIL_LINES:]
    seconds = round(time.time() - start, 1)
    return {"status": status, "seconds": seconds, "lines": told_back["lines"], "tail": tail}


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a process, and kill what is left of its group; None where it did not end."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Its children, such as ranks and readers, are of the same group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _status(told: Mapping[str, Any], code: int | None) -> str:
    """Sum a phase up, by what it told and its exit status."""
    if code is None:
        return "killed at its limit"
    if code or not told.get("ended"):
        return f"crashed ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"
    return next((line["status"] for line in told["lines"] if line["status"] != OK), OK)

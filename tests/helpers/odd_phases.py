"""Phases that go wrong in every way, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.running import REPORT

FIFO = "held-by-child"


def looks(findings: Findings, setting: Setting) -> None:
    """Note what the report says meanwhile."""
    phases = json.loads(Path(setting.out, REPORT).read_text())["phases"]
    findings.note("seen", **{name: phase["status"] for name, phase in phases.items()})


def fails(findings: Findings, setting: Setting) -> None:
    """Fail with one line of three."""
    findings.check("good", lambda: {"figure": 1})
    findings.check("bad", lambda: {"figure": [][0]})
    findings.note("good again")


def crashes(findings: Findings, setting: Setting) -> None:
    """End without saying so."""
    findings.note("before the crash")
    os.write(1, b"last words\n")
    os._exit(3)


def hangs(findings: Findings, setting: Setting) -> None:
    """Wait for ever, beside a child that holds a pipe open."""
    fifo = Path(setting.out, FIFO)
    child = f"import signal; f = open({str(fifo)!r}, 'w'); print('x', file=f, flush=True)"
    subprocess.Popen([sys.executable, "-c", f"{child}; signal.pause()"])
    findings.note("before the hang")
    signal.pause()

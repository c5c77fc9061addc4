"""Run the tests marked cuda; on a machine without a GPU all of them skip."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.gpu_check.findings import Findings, Setting

_ROOT = Path(__file__).resolve().parents[3]
_RESULT = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/\S+::\S+) *$", re.MULTILINE)
_LIMIT_OF_ONE_S, _ENDING_S = 90, 3.0


def run(findings: Findings, setting: Setting) -> None:
    """Run pytest in a process of its own."""
    findings.check("pytest -m cuda", lambda: _tested(setting))


def _tested(setting: Setting) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-v", "--tb=short", "--color=no"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={_LIMIT_OF_ONE_S}")
    log = Path(setting.scratch, "pytest")
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(setting.left_s - _ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    printed = log.read_text(errors="replace")
    print(printed)
    return summed_up(code, printed, must_pass=setting.device == "cuda")


def summed_up(code: int | None, printed: str, *, must_pass: bool) -> Mapping[str, Any]:
    """Count the tests by their results.

    Args:
        code: pytest's exit status; None where it was killed.
        printed: its output, verbose.
        must_pass: whether it is an error that none has passed.
    Raises:
        RuntimeError: not all went well; the message names those that did not.
    """
    results = dict(_RESULT.findall(printed))
    counts = {name.lower(): num for name, num in Counter(results.values()).items()}
    bad = [name for name, result in results.items() if result in ("FAILED", "ERROR", "XPASS")]
    last = (printed.rstrip().splitlines() or [""])[-1].strip("= ")
    if code is None:
        hanging = [name for name in _BEGUN.findall(printed) if name not in results]
        raise RuntimeError(f"not ended in time: {hanging or last}; {counts}; failed: {bad}")
    if code or (must_pass and not counts.get("passed")):
        raise RuntimeError(f"exit status {code}: {last}; failed: {bad}")
    return {**counts, "said": last}

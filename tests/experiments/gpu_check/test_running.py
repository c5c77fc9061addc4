"""Prove that a phase that hangs or crashes costs itself alone, and that nothing found is lost."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_check.findings import FAILED, NO_TIME, OK, Findings, Setting
from experiments.gpu_check.running import REPORT, Phase, run_phases
from experiments.gpu_check.table import table
from tests.helpers import odd_phases
from tests.helpers.odd_phases import FIFO

_SECONDS, _PATIENCE_S = 24.0, 30.0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def child(out: Path) -> int:
    """Offer the end of a pipe whose other one the hanging phase's child holds."""
    os.mkfifo(out / FIFO)
    return os.open(out / FIFO, os.O_RDONLY | os.O_NONBLOCK)


@pytest.fixture(scope="module")
def report(out: Path, child: int) -> dict[str, Any]:
    """Run all odd phases once."""
    room = odd_phases.__name__
    # The one that hangs has a sixth of the time, as it takes all of its share.
    weights = {"fails": 10.0, "crashes": 10.0, "hangs": 2.0, "looks": 10.0}
    phases = [Phase(name, f"{room}:{name}", weights[name], least_s=0.1) for name in weights]
    phases.append(Phase("starves", f"{room}:looks", 0.1, least_s=1e6))
    setting = Setting("cpu", True, None, str(out), "", time.time() + _SECONDS)
    return run_phases(phases, setting)["phases"]


@pytest.mark.slow
def test_a_phase_that_hangs_is_killed_with_its_children_and_keeps_its_lines(
    report: dict[str, Any], child: int
) -> None:
    assert report["hangs"]["status"] == "killed at its limit"
    assert [line["name"] for line in report["hangs"]["lines"]] == ["before the hang"]
    assert os.read(child, 2) == b"x\n", "it has begun"
    assert select.select([child], [], [], _PATIENCE_S)[0], "it is still alive"
    assert os.read(child, 1) == b""


def test_a_phase_that_crashes_keeps_its_lines_and_says_what_it_printed(
    report: dict[str, Any],
) -> None:
    assert report["crashes"]["status"] == "crashed (exit status 3)"
    assert [line["name"] for line in report["crashes"]["lines"]] == ["before the crash"]
    assert report["crashes"]["tail"][-1] == "last words"


def test_a_line_that_fails_costs_itself_alone(report: dict[str, Any]) -> None:
    assert report["fails"]["status"] == FAILED
    assert [line["status"] for line in report["fails"]["lines"]] == [OK, FAILED, OK]
    assert report["fails"]["lines"][1]["error"] == "IndexError: list index out of range"


def test_the_report_is_whole_before_each_phase(report: dict[str, Any]) -> None:
    (line,) = report["looks"]["lines"]
    before = {name: report[name]["status"] for name in ("fails", "crashes", "hangs")}
    assert line["figures"] == {**before, "looks": "running", "starves": "waiting"}


def test_what_there_is_no_time_for_says_so(report: dict[str, Any], tmp_path: Path) -> None:
    assert report["starves"] == {"status": NO_TIME}
    findings = Findings(tmp_path / "found.json", lambda: 0.0)
    findings.check("late", lambda: pytest.fail("it was begun"))
    (line,) = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert (line["name"], line["status"]) == ("late", NO_TIME)


def test_few_files_are_left_and_the_report_is_one(report: dict[str, Any], out: Path) -> None:
    assert json.loads((out / REPORT).read_text())["phases"] == report
    assert {path.name for path in out.iterdir()} == {REPORT, "log.txt", "table.txt", FIFO}


def test_the_table_has_a_row_for_each_phase_and_line_with_its_share() -> None:
    line = {"name": "steps", "status": OK, "of_ideal": 0.914, "error": ""}
    timed = {
        "status": OK,
        "seconds": 2.0,
        "limit_s": 9.0,
        "lines": [{**line, "figures": {"ms": 3.14159}}],
    }
    rows = table({"phases": {"a": timed, "b": {"status": NO_TIME}}, "seconds": 2.0}).splitlines()
    words = [row.split() for row in rows[1:-1]]
    assert words == [
        ["a", "ok", "2", "of", "9", "s"],
        ["steps", "ok", "0.91", "ms", "3.142"],
        ["b", "no", "time"],
    ]

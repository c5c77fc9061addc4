"""Prove what phases find, count and refuse, and rehearse all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.gpu_check.__main__ import main
from experiments.gpu_check.findings import Findings, Setting
from experiments.gpu_check.loops import Outcome
from experiments.gpu_check.pack import MOST_BYTES, SENTENCES, SOURCES, VIT, VOCABULARY, pack
from experiments.gpu_check.phases import marked_tests, nccl
from experiments.gpu_check.short_runs import (
    EXACTLY,
    IN_FLOAT64,
    ShortRun,
    compared,
    compared_losses,
    that_reads,
    trained_plainly,
)
from experiments.gpu_check.workloads import sentences

ROOT = Path(__file__).resolve().parents[3]
ABSENT = ("datasets", "torchvision", "timm", "xdist", "ruff", "mypy", "scipy", "matplotlib")
COLLECTING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["-m", "cuda", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def run_python(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_tests_of_gpus_are_collected_on_a_machine_that_lacks_what_others_import() -> None:
    code, said = run_python("-c", COLLECTING, *ABSENT)
    assert code == 0, said
    assert "test_two_slots_on_one_gpu_train_as_a_plain_loop_does" in said


@pytest.mark.parametrize("model", ["vit", "bert"])
@pytest.mark.slow
def test_the_ideal_loop_learns_what_the_plain_one_does(model: str) -> None:
    run = ShortRun((0, 3, 3, 1, 1, 0), model, "float64")
    kept = trained_plainly(run, "cpu", keeps=True)
    compared(kept, trained_plainly(run, "cpu"), IN_FLOAT64)


def test_outcomes_that_differ_are_refused_by_name() -> None:
    one = Outcome([1.0], {"weight": torch.ones(2)})
    other = Outcome([1.0], {"weight": torch.tensor([1.0, 1.5])})
    with pytest.raises(ValueError, match=r"^weight differs by 0.5; at most 0 may be"):
        compared(one, other, EXACTLY)
    with pytest.raises(ValueError, match="losses differ by 0.5 of themselves"):
        compared_losses(Outcome([1.5], {}), one)
    with pytest.raises(ValueError, match="no row of the cache was read"):
        that_reads(one)


def test_marked_tests_are_counted_and_those_that_go_wrong_are_named() -> None:
    done = "tests/a.py::test_b[x y] PASSED [ 50%]\ntests/a.py::test_c SKIPPED (no) [100%]\n"
    last = "== 1 passed, 1 skipped in 1.00s =="
    assert marked_tests.summed_up(0, done + last, must_pass=True) == {
        "passed": 1,
        "skipped": 1,
        "said": "1 passed, 1 skipped in 1.00s",
    }
    with pytest.raises(RuntimeError, match=r"in time: \['tests/a.py::test_d'\]; {'passed': 1"):
        marked_tests.summed_up(None, f"{done}tests/a.py::test_d ", must_pass=True)
    with pytest.raises(RuntimeError, match=r"failed: \['tests/a.py::test_d'\]"):
        marked_tests.summed_up(1, f"{done}tests/a.py::test_d FAILED [100%]\n", must_pass=True)
    with pytest.raises(RuntimeError, match="exit status 0: 1 skipped"):
        marked_tests.summed_up(0, "tests/a.py::test_c SKIPPED\n1 skipped", must_pass=True)


def test_a_library_that_refuses_two_ranks_on_a_gpu_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    setting = Setting("cuda", False, None, str(tmp_path), str(tmp_path), 1e12)
    nccl.run(Findings(tmp_path / "found.json", lambda: 60.0), setting)
    (line,) = json.loads((tmp_path / "found.json").read_text())["lines"]
    assert (line["name"], line["status"]) == ("skipped", "ok")
    assert line["figures"]["why"].startswith("NCCL (2, 29, 7) refuses two ranks on one GPU")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Offer data sets of a few bytes."""
    for path in SOURCES.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    lines = "".join(f"a film {n}\t{n % 2}\n" for n in range(5000))
    (tmp_path / SOURCES[SENTENCES]).write_text("sentence\tlabel\n" + lines)
    (tmp_path / SOURCES[VOCABULARY]).write_text("film\na\n")
    return tmp_path


def test_what_is_packed_are_the_first_sentences_and_the_rest_as_it_is(source: Path) -> None:
    folder = source / "packed"
    sizes = pack(source, folder)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes
    rows = sentences(str(folder), 4000, 6)
    assert rows[3999]["input_ids"].tolist() == [101, 1, 0, 100, 102, 0]
    assert rows[3999]["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0]
    assert rows[3999]["labels"] == 1
    assert len((folder / SENTENCES).read_text().splitlines()) == 4001


def test_too_much_or_too_little_to_pack_is_refused(source: Path) -> None:
    with (source / SOURCES[VIT]).open("wb") as file:
        file.truncate(MOST_BYTES)
    with pytest.raises(ValueError, match="at most 56000000 may be"):
        pack(source, source / "packed")
    (source / SOURCES[VIT]).unlink()
    with pytest.raises(ValueError, match=r"lacks \['vit-small.*give --source"):
        pack(source, source / "packed")


def rehearse(out: Path, *options: str) -> dict[str, Any]:
    common = ["--device", "cpu", "--tiny", "--out", str(out)]
    assert main([*common, *options]) == 0, (out / "table.txt").read_text()
    phases: dict[str, Any] = json.loads((out / "report.json").read_text())["phases"]
    return phases


@pytest.mark.slow
def test_two_phases_are_rehearsed(tmp_path: Path) -> None:
    phases = rehearse(tmp_path, "--only", "card", "memory", "--seconds", "300")
    assert [phases[name]["status"] for name in ("card", "memory")] == ["ok", "ok"]


@pytest.mark.slow
def test_published_lines_of_one_partition_are_rehearsed(tmp_path: Path) -> None:
    phase = rehearse(tmp_path, "--only", "gpipe", "--seconds", "300")["gpipe"]
    assert [line["name"].split(",")[0] for line in phase["lines"]] == [
        *["unet_speed"] * 2, *["resnet101_speed"] * 2, *["amoebanetd_speed"] * 3,
        *["unet_memory"] * 2, *["amoebanetd_memory"] * 2,
    ]  # fmt: skip
    figures = phase["lines"][1]["figures"]
    assert figures["torchgpipe /s"] == "24.456" and figures["samples_per_s"] > 0
    figures = phase["lines"][-1]["figures"]
    assert figures["torchgpipe activations"] == "0.91 GiB" and figures["activations MiB"] > 0


@pytest.mark.slow
def test_all_phases_are_rehearsed(tmp_path: Path) -> None:
    phases = rehearse(tmp_path, "--seconds", "900")
    timed = [line for line in phases["loops"]["lines"] if line["of_ideal"] is not None]
    assert len(timed) == 5 * 3 * 2
    timed = [line for line in phases["parts"]["lines"] if line["of_ideal"] is not None]
    assert len(timed) == 4 * 2
    assert len(list(tmp_path.iterdir())) <= 8

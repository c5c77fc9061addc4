"""Prove that the demo compares its runs by what they recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import demo
from experiments.demo import (
    DemoSettings,
    clear_folder,
    run_folder,
    run_settings,
    summary_table,
    write_report,
)
from pipetransformer.checkpoint import LOCK_FILE, lock_folder
from tests.autopipe.plan.test_published import vit_base
from tests.pipetransformer.report.test_pictures import run_of

SECONDS = {"elastic": 50.0, "published": 80.0, "baseline": 100.0}
FIGURES = {
    "baseline": {"seconds": 180.0, "samples_per_s": 160.0, "accuracy": 0.981},
    "published": {
        "seconds": 120.0, "samples_per_s": 240.0, "accuracy": 0.98, "cache_hit_rate": 0.6,
        "speedup": 1.5, "ideal_speedup": 2.0,
    },
    "elastic": {
        "seconds": 90.0, "samples_per_s": 320.0, "accuracy": 0.979, "cache_hit_rate": 0.63,
        "speedup": 2.0, "ideal_speedup": 2.5,
    },
}  # fmt: skip


def pretend(settings: DemoSettings, run: str) -> None:
    """Leave what a run leaves: two epochs of two steps, with other samples a second."""
    folder = run_folder(settings, run)
    folder.mkdir(parents=True)
    records = run_of(2)
    for record in records:
        if record["kind"] == "step":
            frozen = 0 if run == "baseline" else record["epoch"]
            record |= {"frozen": frozen, "samples": 8, "micro_batches": 2}
    for record in records:
        record.setdefault("step", 0)
        record.setdefault("elapsed_s", 0.0)
    (folder / "records.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    result = {
        "seconds": SECONDS[run],
        "samples": 400,
        "cache_hits": 3,
        "cache_misses": 1,
        "transitions": [],
        "metrics": {"accuracy": 0.9},
        "profile": vit_base().to_json(),
        "cache_bytes_per_s": 1e9,
        "num_samples": 16,
        "device": "cpu",
    }
    (folder / "result.json").write_text(json.dumps(result))


def test_the_report_compares_all_runs_with_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "plain_seconds", lambda frozen, **_: 10.0 * len(frozen))
    settings, said = DemoSettings(folder=str(tmp_path / "demo"), published=True), list[str]()
    for run in settings.runs:
        pretend(settings, run)
    runs = write_report(settings, said.append)["runs"]
    assert list(runs) == ["baseline", "published", "elastic"]
    assert [runs[run].get("speedup") for run in runs] == [None, 1.25, 2.0]
    assert [runs[run]["samples_per_s"] for run in runs] == [4.0, 5.0, 8.0]
    assert runs["elastic"]["cache_hit_rate"] == 0.75
    # The same was frozen in both.
    assert runs["elastic"]["ideal_speedup"] == runs["published"]["ideal_speedup"] > 1
    (text,) = said
    assert "depth: 40.0 s" in text
    assert "speed-up                                       1.25 x   2.00 x" in text
    assert (tmp_path / "demo/report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "demo" / "summary.json").read_text())["runs"] == runs


@pytest.mark.parametrize("run", DemoSettings(published=True).runs)
def test_runs_differ_in_nothing_but_how_pipelines_are_planned(run: str) -> None:
    settings = DemoSettings()
    differing = {"pipeline_length", "plan", "folder", "label"}
    own, elastic = (run_settings(settings, one) for one in (run, "elastic"))
    rates = [one.pop("learning_rate_schedule")(3, 10) for one in (own, elastic)]
    assert rates[0] == rates[1]
    assert {k for k in own if own[k] != elastic[k]} <= differing
    assert own["pipeline_length"] == (demo.NUM_SLOTS if run == "baseline" else None)
    assert own["plan"] == ("published" if run == "published" else "fastest")


def test_summary_table_shows_all_runs_and_their_shares_of_the_ideal() -> None:
    assert summary_table(FIGURES) == "\n".join(
        [
            "                    without freezing  published rules  elastic",
            "time (s)                       180.0            120.0     90.0",
            "samples/s                      160.0            240.0    320.0",
            "test accuracy                 98.10%           98.00%   97.90%",
            "cache hits                                      60.0%    63.0%",
            "speed-up                                       1.50 x   2.00 x",
            "ideal speed-up                                 2.00 x   2.50 x",
            "share of the ideal                                75%      80%",
        ]
    )


def test_clearing_leaves_an_empty_folder_that_can_be_locked(tmp_path: Path) -> None:
    (tmp_path / "demo" / "baseline").mkdir(parents=True)
    for name in ("records.jsonl", LOCK_FILE, f"baseline/{LOCK_FILE}", "baseline/weights"):
        (tmp_path / "demo" / name).touch()
    clear_folder(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [LOCK_FILE]
    lock_folder(tmp_path / "demo").close()
    clear_folder(tmp_path / "absent")


def test_a_folder_below_which_a_run_trains_is_not_cleared(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "weights").touch()
        with pytest.raises(ValueError, match="is training in folder"):
            clear_folder(tmp_path)
    assert (tmp_path / "run" / "weights").exists()

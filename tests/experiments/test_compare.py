"""Prove that the tables of rivals and of policies are of complete runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments import compare
from experiments.compare_policies import main, parse
from experiments.finetune.finished_run import FinishedRun, draw_learning, learning_of
from experiments.finetune.killed_run import has_saved
from experiments.finetune.series import series_of
from experiments.finetune.usage import start
from tests.helpers.scenario import Scenario, Shape, make_trainer


def write_run(folder: Path, metrics: list[float], *, seconds: float, before: float = 0) -> None:
    """Write what a run leaves: a step and an evaluation for every metric."""
    elapsed = {"elapsed_s": before + seconds} if before else {}
    folder.mkdir(parents=True)
    records = []
    for epoch, metric in enumerate(metrics):
        step = {"kind": "step", "step": epoch, "seconds": seconds, "epoch": epoch}
        step |= {"frozen": epoch, **elapsed}
        records += [step, {"kind": "evaluation", "step": epoch + 1, "f1": metric}]
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    summary = {
        "metric": "f1",
        "metrics": {"f1": metrics[-1]},
        "train_s": seconds * len(metrics),
        "details": {"kept_bytes": 7_000_000},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def test_a_table_has_means_and_the_time_to_the_loops_metric(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"ddp-seed{seed}", [50.0, 80.0, 90.0], seconds=10.0)
        write_run(tmp_path / f"ours-seed{seed}", [60.0, 89.6, 89.0 + seed], seconds=5.0, before=2)
        write_run(tmp_path / f"static-seed{seed}", [40.0, 50.0, 60.0], seconds=4.0)
    write_run(tmp_path / "lora-seed0", [40.0], seconds=4.0)  # Its other seed is not complete.
    given = ["--script", "bert", "--recipe", "none", "--folder", str(tmp_path)]
    options = compare.parse([*given, "--seeds", "0", "1"])
    rows = compare.read_rows(series_of(options), options.rows)
    table = compare.table(rows)
    assert "| ddp | 90.0 ± 0.0 | 30 ± 0 | 0.0 | 1.00 | 30 | 0 1 2 | 7 |" in table
    assert "| ours | 89.5 ± 0.7 | 15 ± 0 | 2.0 | 0.57 | 12 |" in table
    assert "| static | 60.0 ± 0.0 | 12 ± 0 | 0.0 | 0.40 | 0 of 2 seeds |" in table
    assert "lora" not in table
    assert compare.gains(rows) == []
    best = dataclasses.replace(rows[0], name="ddp+freeze", train_s=[20.0, 16.0])
    found = compare.gains([*rows, best])
    assert found[0] == "freezing, in the faster of the plain loops: 1.69 ± 0.27 x"
    assert found[1] == "ours, over that: 1.06 ± 0.17 x" and len(found) == 2
    alone = compare.table([row for row in rows if row.name == "ours"])
    assert "| ours | 89.5 ± 0.7 | 15 ± 0 | 2.0 |  | 12 |" in alone
    picture = tmp_path / "learning.png"
    curves = [run.learning for run in series_of(options).runs_of("ddp")]
    draw_learning({"ddp": curves}, picture, label="f1")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_learning_counts_decisions_and_transitions_and_each_step_once(tmp_path: Path) -> None:
    def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
        return {"kind": kind, "step": step, "elapsed_s": 0.0, **fields}

    def moved(step: int, before_s: float | None) -> dict[str, Any]:
        return event("transition", step, seconds=100.0, predicted_step_before_s=before_s)

    steps = [event("step", step, seconds=1.0) for step in range(6)]
    records = [
        event("decision", 0, seconds=0.5), moved(0, None), *steps[:2],
        event("decision", 2, seconds=0.25), moved(2, 1.0), *steps[2:4],
        event("evaluation", 4, f1=1.0), event("checkpoint", 4), *steps[4:],
        event("evaluation", 6, f1=7.0),  # Killed here, and gone on with from step 4.
        moved(4, None), event("decision", 4, seconds=0.125), *steps[4:],
        event("evaluation", 6, f1=2.0),
    ]  # fmt: skip
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    found = learning_of(FinishedRun(tmp_path).records, "f1")
    assert found == [(104.75, 1.0), (106.875, 2.0)]


@pytest.mark.slow
def test_rows_are_trained_once_each_by_their_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('task = "sst2"\nfreeze = "schedule:0,2"\nnum_train_epochs = 2\n')
    given = ["--script", "bert", "--recipe", str(recipe), "--folder", str(tmp_path / "runs")]
    rows = ["--seeds", "0", "--rows", "ddp", "ours", "short", "--", "--smoke"]
    rows += ["--memory_limit_bytes", "900000000", "--lora_learning_rate", "1"]
    compare.main([*given, *rows])
    first = capsys.readouterr().out
    assert first.count("seed 0, ") == 3 and "| short |" in first
    assert "ddp, short: without --freeze=schedule:0,2 --memory_limit_bytes 900000000" in first
    assert "ours: without --lora_learning_rate 1\n" in first
    compare.main([*given, *rows])
    again = capsys.readouterr().out
    assert "seed 0, " not in again and "ddp, short: without --freeze=schedule:0,2" in again
    with pytest.raises(ValueError, match="holds a run of other options"):
        compare.main([*given, *rows, "--global_batch_size", "8"])
    recipe.write_text('task = "sst2"\nfreeze = "schedule:0,3"\nnum_train_epochs = 2\n')
    with pytest.raises(ValueError, match="or another recipe"):
        compare.main([*given, *rows])


def test_rows_that_follow_from_ours_are_refused_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--script", "bert", "--recipe", "sst2", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit):
        compare.parse([*given, "--rows", "ddp", "short"])
    assert "follow from the row 'ours'; add it" in capsys.readouterr().err


def test_a_loop_that_keeps_activations_is_refused_before_augmented_images_train(
    tmp_path: Path,
) -> None:
    given = ["--script", "vit", "--recipe", "cifar10", "--folder", str(tmp_path)]
    with pytest.raises(ValueError, match=r"ddp\+freeze\+cache would keep crops that never"):
        compare.main([*given, "--", "--augment", "--cache_views", "0"])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given", ["--seed=3", "--baseline", "--static_layers", "--static-layers=2"]
)
def test_what_differs_between_runs_is_refused_as_an_option_of_all(
    tmp_path: Path, given: str
) -> None:
    options = compare.parse(
        ["--script", "bert", "--recipe", "sst2", "--folder", str(tmp_path), "--", given]
    )
    with pytest.raises(ValueError, match="behind -- would be those of all runs alike"):
        series_of(options)


def test_a_metric_without_a_value_is_read_as_nan(tmp_path: Path) -> None:
    # The correlation with a constant prediction: JSON has no NaN, and so no number is there.
    write_run(tmp_path / "run", [50.0], seconds=1.0)
    for name in ("records.jsonl", "summary.json"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace('"f1": 50.0', '"f1": null'))
    run = FinishedRun(tmp_path / "run")
    assert math.isnan(run.metric) and math.isnan(run.learning[0][1])
    assert run.reached_s(0.0) is None


def test_a_killed_run_that_had_saved_nothing_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert not has_saved(tmp_path)
    # Killed while it saved for the first time; its table said that measuring had taken as long.
    (tmp_path / "checkpoints" / "step-00000003.partial").mkdir(parents=True)
    assert not has_saved(tmp_path)
    (tmp_path / "loop.safetensors").touch()
    assert has_saved(tmp_path)


def test_a_killed_run_that_has_saved_is_kept(tmp_path: Path) -> None:
    scenario = Scenario({0: Shape(1, 1)})
    saving = {"folder": tmp_path, "checkpoint_every_steps": 1}
    with make_trainer(scenario, scenario.policy(), **saving) as trainer:
        trainer.step()
    assert has_saved(tmp_path)
    # What is damaged is not thrown away: the run says so when it is to go on.
    (tmp_path / "checkpoints" / "latest").write_text("{bad")
    assert has_saved(tmp_path)


def test_a_run_of_a_series_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--script", "bert", "--recipe", "sst2", "--folder", str(tmp_path), "--seeds", "0"]
    monkeypatch.setattr("sys.argv", ["compare", *given, "--rows", "ddp"])
    monkeypatch.setattr("sys.executable", "false")  # It fails whatever it is to do.
    with pytest.raises(SystemExit, match="ddp with seed 0 ended with status 1; see .*ddp-seed0"):
        start(compare.main)


@pytest.mark.slow
def test_every_policy_gets_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, picture = tmp_path / "tiny.toml", tmp_path / "learning.png"
    recipe.write_text('task = "sst2"\nnum_train_epochs = 2\n')
    main(
        [
            "--script", "bert", "--recipe", str(recipe), "--folder", str(tmp_path / "runs"),
            "--seeds", "0", "--policies", "alpha:1/2", "auto", "--short", "alpha:1/2",
            "--others", "static", "--static_layers", "1", "--interval", "0.25",
            "--picture", str(picture), "--", "--smoke",
        ]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    names = ["none", "alpha:1/2", "auto", "static", "short as alpha:1/2"]
    rows = json.loads(lines[-1])
    assert [row["name"] for row in rows] == names
    tables = [line.split(" | ")[0].strip("| ") for line in lines if line.startswith("|")]
    assert [name for name in tables if name in names] == names * 2
    depths = [line for line in lines if line.startswith("| alpha:1/2")][1].split(" | ")[1:11]
    assert depths[0] == "0" and float(depths[-1]) > 0
    static = [line for line in lines if line.startswith("| static")][1].split(" | ")[1:11]
    assert set(static) == {"1"}
    assert picture.exists()


def test_a_shortened_rival_needs_its_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--script", "vit", "--recipe", "x", "--folder", "y", "--short", "auto:10"])
    assert "not among --policies" in capsys.readouterr().err


def test_what_names_no_policy_is_refused_before_any_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    with pytest.raises(SystemExit):
        main(["--script", "vit", "--recipe", "x", "--folder", str(folder), "--policies", "alpha"])
    assert "'alpha' names no freeze policy" in capsys.readouterr().err
    assert not folder.exists()

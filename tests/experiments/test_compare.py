"""Prove that the tables of rivals and of policies are of complete runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import compare
from experiments.finetune.finished_run import draw_learning
from experiments.finetune.series import series_of


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["ddp", "autos"], "--rows: "),
        (["none", "short as auto"], "'short as auto' follows from the row 'auto'; add it"),
        (["ddp", "short"], "follow from the row 'ours'; add it"),
    ],
)
def test_rows_that_name_nothing_or_follow_from_nothing_are_refused(
    rows: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--script", "bert", "--recipe", "none", "--folder", "", "--rows", *rows])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_every_policy_gets_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, picture = tmp_path / "tiny.toml", tmp_path / "learning.png"
    recipe.write_text('task = "sst2"\nnum_train_epochs = 2\n')
    compare.main(
        [
            "--script", "bert", "--recipe", str(recipe), "--folder", str(tmp_path / "runs"),
            "--seeds", "0", "--rows", "none", "alpha:1/2", "auto", "static",
            "short as alpha:1/2", "--static_layers", "1", "--interval", "0.25",
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

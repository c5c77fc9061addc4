"""Prove that every policy gets its row, and that depths are those that were frozen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.compare_policies import main, parse


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

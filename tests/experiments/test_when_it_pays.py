"""Prove that ways of saving time are given their share, and are set beside the unfrozen run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from experiments.when_it_pays import (
    TASKS,
    UNFROZEN,
    Point,
    draw,
    options_of,
    parse,
    points_of,
    series_of,
    table,
    ways_of,
)

GIVEN = {"cifar10": "images.npz", "vit": "vit.safetensors", "sst2": "sst2", "minilm": "minilm"}


def options_in(folder: Path, *seeds: str) -> argparse.Namespace:
    files = [part for name, value in GIVEN.items() for part in (f"--{name}", value)]
    return parse(["--folder", str(folder), "--seeds", *(seeds or ("0",)), *files])


def leave(folder: Path, accuracy: float, seconds: float, *, held_up: float | None = None) -> None:
    """Leave what a finished run does: 10 s of measuring, and a step."""
    folder.mkdir(parents=True)
    step = {"kind": "step", "step": 0, "frozen": 0, "seconds": seconds, "elapsed_s": seconds + 10}
    (folder / "records.jsonl").write_text(json.dumps(step) + "\n")
    summary = {
        "metric": "accuracy",
        "metrics": {"accuracy": 50.0, "held_out_accuracy": accuracy},
        "train_s": seconds,
        "steps": 200,
        "details": {"held_up": held_up},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("name", TASKS)
def test_every_row_is_asked_for_its_share_of_steps_or_layers(tmp_path: Path, name: str) -> None:
    series = series_of(name, options_in(tmp_path))
    leave(tmp_path / name / "nothing-saved-seed0", 90.0, 90.0)
    leave(tmp_path / name / "LoRA-1-seed0", 80.0, 50.0)  # 0.6 of the time.
    rows = [row for rows in ways_of(TASKS[name]).values() for row in rows]
    asked = {row: options_of(series, row, 0) for row in rows}
    layers = TASKS[name].layers
    assert asked[UNFROZEN][:2] == ["--baseline", "ddp"]
    assert asked["fewer steps 0.3"][2:4] == ["--max_steps", "60"]
    # Half of the saving by steps, half by freezing: the root of 0.5 is 0.71.
    assert asked["budget 0.5"][:2] == ["--freeze", "budget:0.71"]
    assert asked["budget 0.5"][4:6] == ["--max_steps", "141"]
    assert asked["LoRA 1"][:4] == ["--baseline", "lora", "--max_steps", "200"]
    assert asked["LoRA 0.5"][:4] == ["--baseline", "lora", "--max_steps", "167"]
    assert asked[f"frozen {layers // 2}"][:2] == ["--freeze", f"schedule:{layers // 2}"]
    assert asked["paper:1/2"] == ["--freeze", "paper:1/2", "--evaluate_every_epochs", "0"]
    assert asked["linear"][2:4] == ["--freeze_interval_share", "0.02"]
    assert len(rows) == len(set(rows)) == 14


def test_a_point_is_a_share_of_its_own_seed_s_time_without_what_others_had(tmp_path: Path) -> None:
    series = series_of("sst2", options_in(tmp_path, "0", "1"))
    for seed, whole in ((0, 90.0), (1, 190.0)):
        leave(tmp_path / f"sst2/nothing-saved-seed{seed}", 91.0, whole)
        leave(tmp_path / f"sst2/linear-seed{seed}", 90.0 + seed, 90.0, held_up=0.5)
    leave(tmp_path / "sst2/paper-1-2-seed0", 90.0, 90.0)  # Its other seed is not complete.
    first, linear = points_of("sst2", series)
    assert (first.row, first.share) == (UNFROZEN, [1.0, 1.0])
    assert linear == Point("sst2", "policy linear", "linear", [90.0, 91.0], [0.5, 0.25])
    assert table([linear]).splitlines()[-1] == (
        "| policy linear | linear | 0.38 ± 0.18 | 90.5 ± 0.7 | 90.0 91.0 |"
    )


def test_the_picture_has_a_half_for_each_task(tmp_path: Path) -> None:
    points = [
        Point(task, "fewer steps", f"fewer steps {share}", [90.0, 91.0], [share, share])
        for task in TASKS
        for share in (0.3, 0.5)
    ]
    draw(points, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_task_without_its_files_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--folder", "runs", "--tasks", "cifar10", "--vit", "weights"])
    assert "cifar10 needs --cifar10" in capsys.readouterr().err

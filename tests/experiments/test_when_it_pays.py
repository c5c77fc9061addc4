"""Prove that ways of saving time are given their share, and are set beside the unfrozen run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from experiments.when_it_pays import UNFROZEN, Point, parse, points_of, series_of, table

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

"""The table by use is measured piece by piece, and goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import gains
from tests.helpers.marks import slow


@pytest.mark.parametrize(
    ("name", "trains_unfrozen"),
    [("distillation", False), slow("LoRA above", True), slow("our Trainer", True)],
)
def test_a_use_is_measured_once_and_shown(
    name: str, trains_unfrozen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--tiny", "--folder", str(tmp_path), "--only", name]
    assert gains.main(asked) == 0
    first = (tmp_path / "gains.json").read_text()
    times = json.loads(first)[name]["times"]
    assert {len(own) for own in times["seconds"].values()} == {3} and times["row_bytes"] > 0
    assert gains.main(asked) == 0
    assert (tmp_path / "gains.json").read_text() == first
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {name}")]
    assert len(rows) == 2 and (rows[0].split(" | ")[2] != "-") == trains_unfrozen


def test_other_losses_are_an_error() -> None:
    losses = {gains.FROZEN: [1.0], gains.BY_HAND: [1.0], gains.ROWS: [1.1]}
    contest = gains.Contest({}, {way: (lambda own=own: own) for way, own in losses.items()})
    with pytest.raises(ValueError, match="losses of rows differ by 0.1"):
        gains._compare(contest)

"""Run the fine-tuning scripts on the tiny files that they make, and read what they left."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from experiments import bert
from experiments.finetune import outputs
from experiments.finetune.finished_run import FinishedRun


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def losses(folder: Path) -> list[float]:
    """Return the loss of every step of a run, of ours or of a rival."""
    return [record["loss"] for record in FinishedRun(folder).records if record["kind"] == "step"]


def frozen_from(folder: Path) -> dict[int, int]:
    """Return how many layers a run froze, by the steps from which that held."""
    steps = [record for record in FinishedRun(folder).records if record["kind"] == "step"]
    last, found = -1, {}
    for step in steps:
        if step["frozen"] != last:
            last = found[step["step"]] = step["frozen"]
    return found


def smoke(
    folder: Path, *further: str, script: Any = bert, task: str = "sst2", draws: bool = False
) -> dict[str, Any]:
    """Run a script to its end, without its picture where nobody looks at it."""
    named = ("--task", task) if script is bert else ("--dataset", task)
    with nullcontext() if draws else mock.patch.object(outputs, "write_page"):
        script.main([*named, "--smoke", "--output_dir", str(folder), *further])
    return summary(folder)

"""Read what a fine-tuning script left in its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FinishedRun:
    """Read what a run of a script left in its folder."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return its summary.json."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    @property
    def metric(self) -> float:
        """Return the task's main metric at the end."""
        return float(self.summary["metrics"][self.summary["metric"]])

    @property
    def train_s(self) -> float:
        """Return the seconds of training, without evaluations."""
        return float(self.summary["train_s"])

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Return its records, of ours or of a rival."""
        return [json.loads(line) for line in records_file(self.folder).read_text().splitlines()]

    def learning(self) -> list[tuple[float, float]]:
        """Return the seconds of training and the metric at every evaluation; the end is one."""
        name, seconds, found = self.summary["metric"], 0.0, []
        for record in self.records:
            if record["kind"] == "step":
                seconds += record["seconds"]
            elif record["kind"] == "evaluation" and name in record:
                found.append((seconds, float(record[name])))
        return found

    def reached_s(self, goal: float) -> float | None:
        """Return the seconds of training until the metric reached a goal; None if it did not."""
        return next((seconds for seconds, metric in self.learning() if metric >= goal), None)


def records_file(folder: Path) -> Path:
    """Return where a run's records are: in `run` for ours, beside the summary for a rival."""
    own = folder / "run" / "records.jsonl"
    return own if own.exists() else folder / "records.jsonl"

"""Read what a fine-tuning script left in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from experiments.figures import new_figure, open_frame
from pipetransformer.report import RECORDS_FILE, latest_branch

Curve: TypeAlias = list[tuple[float, float]]
"""Seconds of training, and a metric then."""


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
        """Return the task's main metric at the end; NaN where it has no value."""
        return _number(self.summary["metrics"][self.summary["metric"]])

    @property
    def train_s(self) -> float:
        """Return the seconds of training, without evaluations."""
        return float(self.summary["train_s"])

    @property
    def before_s(self) -> float:
        """Return the seconds before the first step, of measuring; 0 for a rival."""
        first = next(record for record in self.records if record["kind"] == "step")
        return float(max(0.0, first.get("elapsed_s", 0.0) - first["seconds"]))

    @property
    def whole_s(self) -> float:
        """Return the seconds of training, with those before the first step."""
        return self.before_s + self.train_s

    @property
    def own_s(self) -> float:
        """Return the seconds of training in which no other program had its core."""
        return self.whole_s * (1 - (self.summary["details"].get("held_up") or 0.0))

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Return its records, of ours or of a rival, without what a resume has discarded."""
        return latest_branch(
            [json.loads(line) for line in (self.folder / RECORDS_FILE).read_text().splitlines()]
        )

    def by_epoch(self, kind: str) -> list[dict[str, Any]]:
        """Return each epoch's last record of a kind."""
        of_kind = [record for record in self.records if record["kind"] == kind]
        return list({record["epoch"]: record for record in of_kind}.values())

    @property
    def learning(self) -> Curve:
        """Return how the task's main metric rose."""
        return learning_of(self.records, self.summary["metric"])

    def reached_s(self, goal: float) -> float | None:
        """Return the seconds until the metric reached a goal, with those before the first step;
        None if it did not.
        """
        found = (self.before_s + seconds for seconds, metric in self.learning if metric >= goal)
        return next(found, None)


def learning_of(records: Iterable[Mapping[str, Any]], metric: str) -> Curve:
    """Return the seconds of training, and a metric at every evaluation.

    As in a report's, decisions count and transitions, but what set the run up or on does not.
    """
    seconds, found = 0.0, []
    for record in records:
        sets_up = record["kind"] == "transition" and record["predicted_step_before_s"] is None
        if record["kind"] in ("step", "decision", "transition") and not sets_up:
            seconds += record.get("seconds", 0.0)  # Decisions did not always have them.
        elif record["kind"] == "evaluation" and metric in record:
            found.append((seconds, _number(record[metric])))
    return found


def _number(value: float | None) -> float:
    """Return a number as JSON holds it, NaN for one that JSON has no word for."""
    return math.nan if value is None else float(value)


def draw_learning(curves: Mapping[str, Sequence[Curve]], path: Path, *, label: str) -> None:
    """Draw a metric over the seconds of training: a color for each name, a line for each run."""
    figure = new_figure(8, 4.5)
    axes = figure.subplots()
    for number, (name, several) in enumerate(curves.items()):
        for index, curve in enumerate(several):
            seconds, metrics = zip(*curve, strict=True)
            own = name if index == 0 else None
            axes.plot(seconds, metrics, color=f"C{number}", marker=".", label=own)
    open_frame(axes, xlabel="seconds of training", ylabel=label, xlim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path)
